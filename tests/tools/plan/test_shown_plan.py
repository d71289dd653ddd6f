"""A plan as lines and commands."""

import re
import shlex
from dataclasses import replace

import pytest
from helpers import ROOT

from kit.config.command_line import read_command_line
from kit.tools.plan.hardware import GPUS
from kit.tools.plan.lengths import Lengths
from kit.tools.plan.request import read_plan_request
from kit.tools.plan.search import options, recommend, try_out
from kit.tools.plan.shown_plan import command, own_config, time_lines


def planned(*words, gpu="24GiB"):
    ask = read_plan_request([*words, "--gpu", gpu])
    found = options(ask.workload, ask.gpu, ask.recipe.global_batch_size, ask.only)
    return ask, found, recommend(found, ask.recipe.method)


def test_the_command_is_one_that_a_run_takes_and_has_only_what_differs_from_the_recipe(tmp_path):
    own = tmp_path / "own.yaml"  # which no run takes without a flag
    own.write_text("max_length: 64\neval_steps: 5\n", encoding="utf-8")
    several = '[{"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl", "weight": 1, "columns": {"q": "prompt"}}]'
    for words in (
        ["--recipe", "llama-8b-full", "--gpus", "8", "--report_to", "tensorboard", "--dataset", several],
        [
            "--model_name_or_path",
            f"{ROOT}/recipes/tiny/model",
            "--objective",
            "dpo",
            "--method",
            "full",
            "--max_length",
            "64",
        ],
        [
            "--recipe",
            str(own),
            "--model_name_or_path",
            f"{ROOT}/recipes/tiny/model",
            "--dataset",
            "a.jsonl",
            "--eval_dataset",
            "b.jsonl",
        ],
    ):
        ask, _, option = planned(*words)
        request = read_command_line(shlex.split(command(option, ask))[3:])
        assert not request.problems, words
        taken, asked = request.recipe, ask.recipe
        assert [entry.path for entry in taken.dataset_entries] == [entry.path for entry in asked.dataset_entries]
        assert (taken.dataset_columns, taken.objective) == (asked.dataset_columns, asked.objective)
        own = option.workload
        assert (taken.method, taken.per_device_train_batch_size) == (own.method, own.rows)
        assert taken.gradient_checkpointing == own.gradient_checkpointing
    ask, _, option = planned("--recipe", "llama-8b-qlora", "--max_length", "1024", "--gpus", "2")
    text = command(option, ask)
    assert "finetune.py --config ddp --recipe llama-8b-qlora --num_processes 2" in text and "--max_length 1024" in text
    assert "--learning_rate" not in text and "--method" not in text


def test_several_machines_need_a_config_of_their_own():
    ask, found, _ = planned("--recipe", "llama-8b-full", "--gpus", "4x8", gpu="h100")
    hybrid = next(o for o in found if o.workload.config == "fsdp_hybrid")
    assert "4 machines" in own_config(hybrid.workload) and "--config my-fsdp_hybrid.yaml" in command(hybrid, ask)
    ask, _, option = planned("--recipe", "llama-8b-lora", "--gpus", "8", gpu="v100-32")
    assert not own_config(option.workload) and "--config fsdp --recipe" in command(option, ask)


def test_8b_in_4_bits_fits_a_t4_in_fp16_with_the_shipped_config():
    """All takes what it takes in bf16, but for keys and values: sdpa has no kernel for grouped ones there."""
    ask, _, option = planned("--recipe", "llama-8b-qlora", gpu="t4")
    assert option.fits and option.workload.mixed_precision == "fp16" and option.workload.method == "qlora"
    assert "finetune.py --config single --recipe llama-8b-qlora" in command(option, ask)
    in_full = replace(option.workload, mixed_precision="bf16", gradient_checkpointing=False, torch_compile=False)
    in_fp16, in_bf16 = (try_out(in_full, gpu).memory for gpu in (option.gpu, replace(option.gpu, bf16=True)))
    repeated = 2 * 2 * (4096 - 1024) * in_full.tokens * in_full.shape.num_layers
    assert in_fp16.components["activations"] - in_bf16.components["activations"] == repeated
    assert in_fp16.tensors - in_bf16.tensors == repeated


LENGTHS = Lengths(
    num_samples=1000, mean=400.0, longest=2048, row=1024.0, supervised=0.3, seen=700.0, num_steps=50, epochs=2.0
)  # fmt: skip


def test_hours_and_cost_are_those_of_the_steps_and_of_the_data():
    _, _, option = planned("--recipe", "llama-8b-lora", gpu="h100")
    fast, slow = option.step.seconds
    time, whole = time_lines(option, 500, price=2.0)
    assert "with padding" in time
    assert f"cost {2 * 500 * fast / 3600:,.2f} to {2 * 500 * slow / 3600:,.2f}" in whole
    data, _, whole = time_lines(option, None, lengths=LENGTHS)
    assert "supervised: 30.0% of" in data and whole.startswith("50 steps: ") and "if every row" not in whole
    rolls_out = ("--recipe", "llama-8b-lora", "--objective", "grpo")
    of_tools = ("--tools", "own.py:add", "--max_new_tokens", "256", "--max_turns")
    beside = [
        time_lines(planned(*rolls_out, *flags, gpu="h100")[2], 200)[-1]
        for flags in ((), ("--max_new_tokens", "256"), (*of_tools, "2"), (*of_tools, "99"))
    ]
    seconds = [float(re.search("at least ([0-9.]+) to", line)[1]) for line in beside]
    assert seconds[:3] == pytest.approx([5.5, 2.75, 5.5], rel=0.05), "64 answers at once, 2,144 kernels a token"
    assert seconds[3] == pytest.approx(2.75 * 1024 / 256, rel=0.05)  # at max_length
    assert beside[1].endswith(" has max_new_tokens") and beside[2].endswith(
        " max_turns of max_new_tokens, or max_length"
    )
    unknown = try_out(option.workload, replace(GPUS["h100"], tflops=None))
    assert "time: unknown for" in time_lines(unknown, 500)[0]
