"""Sequence parallelism gives the losses and gradients of one process, whatever the number of tokens of a row."""

import json
import shutil

import pytest
from helpers import make_model

pytestmark = pytest.mark.slow

FLAGS = {
    "max_steps": 6,
    "global_batch_size": 12,
    "learning_rate": 2e-3,
    "max_length": 125,
    "excess_length_strategy": "truncate",
}
CASES = [
    # Four processes per row, and two key heads; packs whose bounds lie anywhere, of an odd number of tokens.
    ("fsdp", 4, 4, {"method": "full", "packing": True, "neftune_noise_alpha": 5.0, "label_smoothing_factor": 0.1}),
    pytest.param(
        *("fsdp_hybrid", 4, 2, {"method": "qlora", "packing": True, "per_device_train_batch_size": 1}),
        marks=pytest.mark.release,
    ),
]


@pytest.mark.parametrize(("config", "processes", "size", "case"), CASES)
def test_sequence_parallelism_gives_the_losses_of_whole_rows(finetune, fp32, config, processes, size, case):
    flags = FLAGS | case
    whole = finetune.ok("whole", config=fp32["single"], **flags)
    parallel = finetune.ok("parallel", processes, config=fp32[config], sequence_parallel_size=size, **flags)
    for ours, theirs in zip(parallel.rows, whole.rows, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert ours["tokens"] == theirs["tokens"]
    assert f"sequence parallelism over {size}" in parallel.output


def test_rows_of_few_tokens_a_teacher_and_evaluations_with_answers(finetune, fp32, chat_file, tmp_path):
    """Rows of one to nine tokens over four processes, in a global batch of one: most have no target, some no token."""
    teacher = make_model(tmp_path / "teacher", hidden_size=64)
    rows = [{"input_ids": [5] * n + [7 + n], "labels": [-100] * n + [7 + n]} for n in (1, 2, 3, 8)]
    (data := tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = {"method": "full", "objective": "distil", "teacher": teacher, "dataset": data, "global_batch_size": 1}
    flags |= {"max_steps": 4, "per_device_train_batch_size": 1, "eval_dataset": chat_file, "eval_steps": 2}
    flags |= {"predict_with_generate": True, "max_new_tokens": 4, "max_eval_samples": 5}
    whole = finetune.ok("whole", config=fp32["single"], **flags)
    parallel = finetune.ok("parallel", 4, config=fp32["ddp"], sequence_parallel_size=4, **flags)
    keys = ("loss", "divergence", "eval_loss", "eval_exact_match")
    for ours, theirs in zip(parallel.rows, whole.rows, strict=True):
        for key in set(keys) & set(theirs):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-6, abs=1e-6), key


def test_a_checkpoint_resumes_with_another_group_size(finetune, fp32):
    flags = FLAGS | {"method": "lora", "packing": True, "save_steps": 3, "per_device_train_batch_size": 1}
    whole = finetune.ok("whole", config=fp32["single"], **flags)
    finetune.ok("run", 2, config=fp32["fsdp"], sequence_parallel_size=2, **flags)
    for folder in ("checkpoints/step-00000006", "final"):
        shutil.rmtree(finetune.folder / "run" / folder)
    again = finetune.ok("run", 2, config=fp32["fsdp"], sequence_parallel_size=1, **flags)
    assert "sequence_parallel_size: 2 -> 1" in again.output
    assert [row["loss"] for row in again.rows] == pytest.approx([row["loss"] for row in whole.rows], rel=1e-6)


@pytest.mark.parametrize(
    ("changed", "flags", "message"),
    [
        ({}, {"sequence_parallel_size": 3}, "sequence_parallel_size: 3 with 4 processes"),
        ({"num_attention_heads": 2}, {}, "4, with 2 attention heads; expected one of 1, 2"),
        ({"attention_dropout": 0.1}, {}, "4, with attention_dropout 0.1"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, {}, "dynamic RoPE"),
        ({}, {"attn_implementation": "sdpa"}, "4, with attn_implementation sdpa"),
    ],
)
def test_unsupported_models_are_refused_before_weights_are_read(finetune, tmp_path, changed, flags, message):
    model = make_model(tmp_path / "other", **changed)
    flags = {"sequence_parallel_size": 4, "model_name_or_path": model, **flags}
    run = finetune("run", config="ddp", num_processes=4, dry_run=True, **flags)
    assert run.status == 2 and message in run.output, run.output
