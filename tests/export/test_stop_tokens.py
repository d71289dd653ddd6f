"""Plain ``generate`` of what a run leaves stops at the token that ends its answers, and at nothing else."""

import re
import shutil

import pytest
from helpers import export, make_model
from transformers import AutoTokenizer, GenerationConfig


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
    assert "stop tokens added to the model in final/: <|im_end|>" in run.output
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
