"""What a run leaves is what it trained: final/, an exported checkpoint and a merged model, opened without the kit."""

import json
import re
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Finetune, export, fake_llmcompressor, forge, make_model, matrix
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kit.checkpoint.load import load_weights
from kit.data.chat.shipped import SHIPPED
from kit.model.build import build_model, open_config
from kit.model.load_plan import LoadPlan
from kit.run.record import read_run
from kit.system.errors import TrainingError

pytestmark = pytest.mark.slow
FP32 = LoadPlan(compute_dtype="float32", device="cpu")
RUNS = {"full": ("fsdp", 2), "lora": ("ddp", 2)}
NUM_SAMPLES = 5


@pytest.fixture(scope="module")
def bases(model_folder, tmp_path_factory):
    return {"untied": model_folder, "tied": make_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)}


@pytest.fixture(scope="module")
def trained(bases, fp32, chat_file, tmp_path_factory):
    """By method: a run of three steps, made once."""
    finetune = Finetune(bases["untied"], chat_file, tmp_path_factory.mktemp("runs"))
    flags = {"max_steps": 3, "save_steps": 2, "train_on": "all"}
    flags |= {"eval_dataset": chat_file, "max_eval_samples": NUM_SAMPLES}

    @cache
    def get(method):
        config, processes = RUNS[method]
        base = bases["tied"]
        return finetune.ok(method, processes, config=fp32[config], method=method, model_name_or_path=base, **flags)

    return get


@pytest.fixture(scope="module")
def sequences(chat_file, model_folder):
    """The evaluation samples, tokenised by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    lines = chat_file.read_text().splitlines()[:NUM_SAMPLES]
    chats = [json.loads(line)["messages"] for line in lines]
    return [tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)["input_ids"] for chat in chats]


@torch.no_grad()
def ask(model, sequences):
    model.eval()
    return [model(input_ids=ids).logits[0] for ids in sequences]


def largest(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def open_plainly(folder, base, method):
    """As somebody without the kit would."""
    if method == "full":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)


def last_checkpoint(run, step=3):
    return run.folder / f"checkpoints/step-{step:08d}"


def weights_of(folder):
    return load_file(next(folder.glob("*model.safetensors")))


def contents(folder):
    """Each file's bytes; of JSON the values, without the order of a set and whether the hub could be reached."""

    def read(path):
        values = {k: v for k, v in json.loads(path.read_text()).items() if k != "local_files_only"}
        return {key: sorted(v) if key == "target_modules" else v for key, v in values.items()}

    return {path.name: read(path) if path.suffix == ".json" else path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("method", matrix(["full", "lora"]))
def test_an_earlier_checkpoint_gives_the_final_of_a_run_that_ended_there(
    finetune, fp32, tmp_path, chat_file, capsys, method
):
    """The base is in bf16, as published ones are, and the chat template is not its own."""
    base = make_model(tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(base).to(torch.bfloat16).save_pretrained(base)
    flags = {"model_name_or_path": base, "config": fp32["single"], "method": method, "chat_template": "alpaca"}
    flags |= {"lr_scheduler_type": "constant", "warmup_steps": 0}  # the same steps, however many follow
    flags |= {"eval_dataset": chat_file, "max_eval_samples": 3}
    short = finetune.ok("short", **flags, max_steps=2)
    long = finetune.ok("long", **flags, max_steps=4, save_steps=1, save_total_limit=0, eval_steps=2)
    export(last_checkpoint(long, 2), tmp_path / "model")
    assert contents(tmp_path / "model") == contents(short.folder / "final") != contents(long.folder / "final")
    export(last_checkpoint(long, 3), tmp_path / "third")  # after an evaluation of other weights
    card = (tmp_path / "third/README.md").read_text()
    assert "\n- 3 steps of" in card and "eval_loss" not in card
    opened: dict[str, Any] = {}
    snippet = card.split("```python")[1].split("```")[0]
    exec(snippet.replace("path/to/this/folder", str(tmp_path / "third")), opened)  # what its reader would do
    assert opened["model"].config.vocab_size == 320
    if method == "lora":
        capsys.readouterr()
        export(last_checkpoint(long, 2), tmp_path / "merged", "--merge")
        said = capsys.readouterr().out
        export(short.folder / "final", tmp_path / "same")
        assert capsys.readouterr().out == said.replace(str(tmp_path / "merged"), str(tmp_path / "same"))
        assert f"to serve it: vllm serve {tmp_path}/merged" in said
        assert contents(tmp_path / "merged") == contents(tmp_path / "same")
        asked = AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
        assert asked == SHIPPED["alpaca"].source
    else:
        assert {tensor.dtype for tensor in weights_of(tmp_path / "model").values()} == {torch.bfloat16}
        export(last_checkpoint(long, 2), tmp_path / "wide", "--dtype=float32")
        assert {tensor.dtype for tensor in weights_of(tmp_path / "wide").values()} == {torch.float32}


def test_a_run_is_quantised_with_its_own_training_rows_for_calibration(
    trained, tmp_path, monkeypatch, chat_file, model_folder
):
    """They are tokenised as in training: with the chat template of the run."""
    home = fake_llmcompressor(tmp_path, monkeypatch)
    export(trained("full").folder, tmp_path / "w8a8", "--format=compressed-tensors", "--scheme=W8A8")
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    chats = [json.loads(line)["messages"] for line in chat_file.read_text().splitlines()]
    expected = [tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"] for chat in chats]
    rows = json.loads((home / "asked.json").read_text())["rows"]
    assert rows == expected[:512] and "calibrated on" in (tmp_path / "w8a8/README.md").read_text()


@pytest.mark.skipif(find_spec("torchao") is None, reason="the extra qat is not installed")
@pytest.mark.parametrize("method", matrix(["lora", "full"]))
def test_what_qat_trained_is_exported_plain_and_quantised_as_it_trained_for(
    finetune, fp32, tmp_path, bases, sequences, capsys, monkeypatch, method
):
    base, scheme = bases["untied"], "int4_weight_only"
    run = finetune.ok(
        "run",
        config=fp32["single"],
        method=method,
        model_name_or_path=base,
        qat=scheme,
        qat_group_size=8,
        max_steps=3,
        learning_rate=0.01,
    )
    export(last_checkpoint(run), tmp_path / "model")
    assert contents(tmp_path / "model") == contents(run.folder / "final")
    home = fake_llmcompressor(tmp_path, monkeypatch)
    if method == "full":
        export(run.folder, tmp_path / "quantised", "--format=compressed-tensors")
    else:
        export(run.folder, tmp_path / "merged")
        command = re.search(r"`kit export (.*) --output_dir quantized (.*)`", capsys.readouterr().out)
        assert Path(command[1]) == base
        export(base, tmp_path / "quantised", *command[2].split())
    asked = json.loads((home / "asked.json").read_text())
    assert (asked["scheme"], asked["group_size"], asked["rows"]) == ("W4A16", 8, [])  # rounded to nearest
    recipe = read_run(run.folder / "run.json")[0]
    trained = build_model(recipe, open_config(recipe), FP32)
    load_weights(trained, last_checkpoint(run))
    assert largest(ask(open_plainly(run.folder / "final", base, method), sequences), ask(trained, sequences)) > 1e-3


def test_an_adapter_that_learned_nothing_is_refused(trained, tmp_path):
    copied = tmp_path / "run/checkpoints/step-00000003"
    shutil.copytree(last_checkpoint(trained("lora")).parents[1], tmp_path / "run")
    for file in copied.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        save_file({k: v * (0 if "lora_B" in k else 1) for k, v in load_file(file).items()}, file, metadata)
    forge(copied)
    for flags in ((), ("--merge",)):
        with pytest.raises(TrainingError, match="lora_B is zero"):
            export(copied, tmp_path / "model", *flags)
        assert not (tmp_path / "model").exists()
