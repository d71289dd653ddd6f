"""Plain ``generate`` of what a run leaves stops at the token that ends its answers, and at nothing else."""

import re
import shutil
from types import SimpleNamespace

import pytest
from helpers import export, make_model
from transformers import AutoTokenizer, GenerationConfig

from kit.export.stops import new_stops, read_stops, write_stops

IM_END = {"<|im_end|>": 2}


def model(eos_token_id):
    return SimpleNamespace(generation_config=GenerationConfig(eos_token_id=eos_token_id))


def test_a_token_at_which_generation_does_not_stop_yet_is_added(tmp_path, model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    for eos, then in (([0, 7], [0, 7, 2]), (None, [2])):
        assert new_stops(model(eos), IM_END) == IM_END
        write_stops(tmp_path, model(eos), IM_END)
        assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == then
        assert "<|im_end|>" in read_stops(tmp_path, tokenizer)
    for damaged in ("{", '{"eos_token_id": [-9]}'):
        (tmp_path / "generation_config.json").write_text(damaged)
        assert read_stops(tmp_path, tokenizer) == {}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base that stops at <|endoftext|>, as published bases do, with a tokenizer of that EOS and no chat template."""
    folder = make_model(tmp_path_factory.mktemp("base"), eos_token_id=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token, tokenizer.chat_template = "<|endoftext|>", None
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 0
    return folder


def eos_of(folder):
    return GenerationConfig.from_pretrained(folder).eos_token_id


def by_its_card(folder):
    """The model that the snippet of the card opens."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(code.replace("path/to/this/folder", str(folder)), names)
    return names["model"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_model_of_a_chat_run_stops_at_the_end_token_of_its_template(finetune, base, tmp_path, method):
    flags = {"model_name_or_path": base, "chat_template": "chatml", "method": method, "max_steps": 2}
    run = finetune.ok("run", **flags, lora_r=4) if method == "lora" else finetune.ok("run", **flags)
    assert "answers end with <|im_end|>: the model in final/ stops there too" in run.output
    opened = by_its_card(run.folder / "final")
    assert opened.generation_config.eos_token_id == eos_of(run.folder / "final") == [0, 2]
    checkpoint = run.folder / "checkpoints/step-00000002"
    export(checkpoint, tmp_path / "exported")
    assert by_its_card(tmp_path / "exported").generation_config.eos_token_id == [0, 2]
    if method == "lora":
        export(checkpoint, tmp_path / "merged", "--merge")
        shutil.copytree(run.folder / "final", tmp_path / "alone")  # without its run.json
        export(tmp_path / "alone", tmp_path / "merged2")
        assert eos_of(tmp_path / "merged") == eos_of(tmp_path / "merged2") == [0, 2]
