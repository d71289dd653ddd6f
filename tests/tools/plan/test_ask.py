"""What the command line of ``kit plan`` means."""

import json

import pytest
from helpers import ROOT

from kit.errors import UserError
from kit.tools.plan import ask as module
from kit.tools.plan.ask import read_ask
from kit.tools.plan.hardware import GPUS


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(module, "this_machine", lambda: None)


def ask(words):
    return read_ask(words.split())


def wrong(words):
    with pytest.raises(UserError) as caught:
        ask(words)
    return str(caught.value)


def test_a_recipe_with_flags_and_a_model_without_a_recipe():
    question = ask("--recipe llama-8b-lora --gpu 24GiB --max_length 1024").question
    assert question.recipe_name == "llama-8b-lora" and question.recipe.max_length == 1024
    assert question.typed == ("max_length",)
    question = ask("--model llama-8b --method full --gpu h100").question
    assert question.recipe_name is None and question.recipe.method == "full"
    assert question.recipe.model_name_or_path == "meta-llama/Llama-3.1-8B"


def test_the_gpus_are_those_that_are_named_or_those_of_this_machine(monkeypatch):
    assert ask("--gpu h100").num_gpus == 1 and ask("").gpu is None
    several = ask("--gpu h100 --num_processes 2x8 --price 1.5")
    assert (several.num_gpus, several.gpus_per_machine, several.price) == (16, 8, 1.5)
    monkeypatch.setattr(module, "this_machine", lambda: (GPUS["t4"], 4))
    assert (ask("").gpu, ask("").num_gpus, ask("--gpus 2").num_gpus) == (GPUS["t4"], 4, 2)


def test_an_adapter_that_is_trained_on_has_its_own_rank_and_modules(tmp_path):
    config = {"base_model_name_or_path": str(ROOT / "recipes/tiny/model"), "r": 64, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    recipe = ask(f"--adapter_name_or_path {tmp_path} --gpu h100 --max_length 64").question.recipe
    assert (recipe.lora_r, recipe.lora_target_modules) == (64, ["q_proj"])


def test_mistakes_are_reported_together():
    text = wrong("--gpu h10 --gpus x --price y --recipe llama-8b-lora --learning_rte 3")
    assert all(word in text for word in ("h100", "--gpus", "--price", "'learning_rate'"))


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--max_length 1024", "for which model"),
        ("--json", "for which model"),
        ("--recipe llama-8b-lora --use_dora --gpu h100", "use_dora: the formulas do not know"),
        ("--model llama-2-7b --max_length 8192 --gpu h100", "--max_length 4096"),
        ("--recipe llama-8b-lora --gpu h100 --gpus 3", "a multiple of 3"),
        ("--recipe llama-8b-lora --gpu a100 --fp8", "no 8-bit products"),
        ("--recipe llama-8b-full --gpu t4 --optim adamw_bf16", "has no bf16"),
        ("--recipe llama-8b-full --gpu h100 --gpus 8 --config single", "one of ddp, fsdp, fsdp_offload"),
        ("--recipe llama-8b-full --optim adamw_8bit --gpu h100 --gpus 8 --config fsdp", "one of ddp"),
        ("--model nobody/nothing --gpu h100", "not in the cache"),
    ],
)
def test_what_cannot_be_planned_is_refused(words, found):
    assert found in wrong(words)
