"""Merging gives a plain model that answers as the adapted one did; what was not trained is not shipped."""

import pytest
import torch
from helpers import export, make_model
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from transformers import AutoModelForCausalLM, AutoTokenizer

from kit.system.errors import TrainingError, UserError


def make_adapter(base, folder, std=0.05, **kind):
    """A LoRA with random B and changed whole modules, as training would leave it."""
    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", **kind)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            parameter.data += torch.randn_like(parameter) * std
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(model_folder, tmp_path):
    return make_adapter(model_folder, tmp_path / "adapter")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 0.0), ("float32", 2.0)])
def test_an_adapter_that_is_lost_or_merged_twice_is_found_however_little_it_has_learned(
    model_folder, tmp_path, monkeypatch, dtype, scale
):
    adapter = make_adapter(model_folder, tmp_path / "adapter", std=0.002)  # of 0.01 nats
    whole = Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda *args: whole(*args) * scale)
    with pytest.raises(
        TrainingError, match=r"the adapter itself changed 0.0.*beyond the bound, so nothing was written"
    ):
        export(adapter, tmp_path / "merged", f"--dtype={dtype}")
    assert not (tmp_path / "merged").exists()


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def refused(adapter, output, base=None):
    """What is said, when nothing is left behind."""
    before = files(output.parents[1])
    with pytest.raises(UserError) as caught:
        export(adapter, output, *([f"--model_name_or_path={base}"] if base else []))
    assert files(output.parents[1]) == before
    return str(caught.value)


@pytest.mark.slow
def test_what_cannot_be_merged_or_written_is_refused_and_leaves_nothing(adapter, model_folder, tmp_path):
    output = tmp_path / "new/merged"
    assert "does not fit" in refused(adapter, output, make_model(tmp_path / "other", hidden_size=64))
    assert "no such folder" in refused(adapter, output, "~/nowhere")
    (tmp_path / "file").touch()
    assert "--output_dir" in refused(adapter, tmp_path / "file/merged")
    assert "--output_dir" in refused(adapter, tmp_path / "new" / ("x" * 300))
    cut = make_model(tmp_path / "cut") / "model.safetensors"
    for weights, names in ((cut, "model_name_or_path"), (adapter / "adapter_model.safetensors", f"adapter: {adapter}")):
        weights.write_bytes(weights.read_bytes()[:-100])
        assert names in refused(adapter, output, cut.parent if weights == cut else model_folder)
    for text in ("[]", "[" * 200_000, '{"base_model_name_or_path": 3}'):
        (adapter / "adapter_config.json").write_text(text)
        for base in (None, model_folder):
            assert "adapter_config.json" in refused(adapter, output, base)
