"""Merging gives a plain model that answers as the adapted one did; what was not trained is not shipped."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from kit.errors import TrainingError, UserError
from kit.export import merge_adapter

IDS = torch.tensor([[1, 40, 50, 60, 7, 9]])


@pytest.fixture
def adapter(model_folder, tmp_path):
    """A LoRA with random B, as training would leave it."""
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_the_merged_model_needs_no_peft_and_has_the_adapter_s_logits(adapter, model_folder, tmp_path):
    merge_adapter(adapter, tmp_path / "merged", None, "float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    plain = base(IDS).logits
    adapted = PeftModel.from_pretrained(base, adapter)(IDS).logits
    assert not (tmp_path / "merged/adapter_config.json").exists()
    assert torch.allclose(merged(IDS).logits, adapted, atol=1e-5)
    assert not torch.allclose(plain, adapted, atol=1e-2)
    chat = [{"role": "user", "content": "red cat"}]
    texts = {
        AutoTokenizer.from_pretrained(path).apply_chat_template(chat, tokenize=False)
        for path in (adapter, tmp_path / "merged")
    }
    assert len(texts) == 1


def test_an_adapter_that_learned_nothing_is_refused(adapter, tmp_path):
    from safetensors.torch import load_file, save_file

    file = adapter / "adapter_model.safetensors"
    save_file({k: v * (0 if "lora_B" in k else 1) for k, v in load_file(file).items()}, file)
    with pytest.raises(TrainingError, match="lora_B is zero"):
        merge_adapter(adapter, tmp_path / "merged", None, "float32")
    assert not (tmp_path / "merged").exists()


def test_a_base_that_moved_is_named_and_can_be_given(adapter, model_folder, tmp_path):
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace(str(model_folder), "/gone"))
    with pytest.raises(UserError, match="--model_name_or_path"):
        merge_adapter(adapter, tmp_path / "merged", None, "float32")
    merge_adapter(adapter, tmp_path / "merged", str(model_folder), "float32")
    assert (tmp_path / "merged/model.safetensors").exists()


@pytest.mark.slow
def test_the_script_never_writes_into_an_existing_folder(adapter, tmp_path):
    (tmp_path / "mine").mkdir()
    command = [sys.executable, ROOT / "recipes/export.py", adapter, "--output_dir", tmp_path / "mine"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "exists" in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / "mine").iterdir())
