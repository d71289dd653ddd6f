"""The command line of ``kit plan``."""

import pytest

from kit.system.errors import UserError
from kit.tools.plan import request as module
from kit.tools.plan.hardware import GPUS
from kit.tools.plan.request import read_plan_request


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(module, "this_machine", lambda: None)


def ask(words):
    return read_plan_request(words.split())


def wrong(words):
    with pytest.raises(UserError) as caught:
        ask(words)
    return str(caught.value)


def test_a_recipe_with_flags_and_a_model_without_a_recipe():
    found = ask("--recipe llama-8b-lora --gpu 24GiB --max_length 1024")
    assert (found.recipe_name, found.recipe.max_length, "dataset" in found.typed) == ("llama-8b-lora", 1024, False)
    found = ask("--model llama-8b --method full --gpu h100")
    assert found.recipe_name is None and found.recipe.method == "full"
    assert found.recipe.model_name_or_path == "meta-llama/Llama-3.1-8B"


def test_the_gpus_are_those_that_are_named_or_those_of_this_machine(monkeypatch):
    assert ask("--model llama-1b --gpu h100").num_gpus == 1 and "--gpu: not given" in wrong("--model llama-1b")
    several = ask("--model llama-1b --gpu h100 --num_processes 2x8 --price 1.5")
    assert (several.num_gpus, several.gpus_per_machine, several.price) == (16, 8, 1.5)
    monkeypatch.setattr(module, "this_machine", lambda: (GPUS["t4"], 4))
    found = ask("--model llama-1b")
    assert (found.gpu, found.num_gpus, ask("--model llama-1b --gpus 2").num_gpus) == (GPUS["t4"], 4, 2)


def test_what_cannot_be_planned_is_refused():
    for words, found in (
        ("--recipe llama-8b-lora --use_dora --gpu h100", "use_dora: not covered by the formulas"),
        ("--recipe llama-8b-lora --gpu a100 --fp8", "no FP8 matmuls"),
        ("--recipe llama-8b-full --gpu t4 --optim adamw_bf16", "has no bf16"),
    ):
        assert found in wrong(words)


def test_of_several_teachers_the_largest_that_runs_here_is_planned():
    entries = '{"path":"a","teacher":"llama-8b"},{"path":"b","teacher":"llama-70b","teacher_server":"http://h:1"}'
    command = "--model llama-1b --gpu h100 --objective distil --teacher_top_k 64 --teacher llama-3b --dataset"
    for more, name in (("", "llama-8b"), (',{"path":"c","teacher":"qwen3-32b"}', "qwen3-32b")):
        found = ask(f"{command} [{entries}{more}]")
        assert found.teacher and found.teacher.name == name
