"""fp16: the losses of float32 up to rounding; steps that overflow are skipped, and change nothing else."""

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import from_scale, matrix
from safetensors.torch import load_file


def never_fits(rank):
    """In a rank, before the script: gradients overflow, whatever the scale is."""
    import kit.train.step

    from_scale(4.0, None, rank)
    kit.train.step.clip_grad_norm = lambda *_: torch.tensor(torch.inf)


def trained(run, step):
    """The weights and moments of a checkpoint, of all ranks."""
    paths = (run.folder / f"checkpoints/step-{step:08d}").glob("*.safetensors")
    return {(path.name, name): tensor for path in paths for name, tensor in load_file(path).items()}


@pytest.fixture(scope="module")
def fp16(tmp_path_factory, fp32):
    """The shipped Accelerate configs in fp16."""
    folder = tmp_path_factory.mktemp("fp16")
    for name, path in fp32.items():
        text = Path(path).read_text().replace('mixed_precision: "no"', "mixed_precision: fp16")
        (folder / f"{name}.yaml").write_text(text)
    return {name: folder / f"{name}.yaml" for name in fp32}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "processes", "method"),
    matrix([("fsdp", 2, "qlora"), ("ddp", 2, "qlora")], rest=[("single", 1, "full"), ("fsdp", 2, "lora")]),
)
def test_losses_are_those_of_float32_up_to_rounding(finetune, fp16, fp32, config, processes, method):
    flags = {"method": method, "learning_rate": 1e-3, "logging_steps": 1}
    wanted = finetune.ok("fp32", config=fp32["single"], **flags)
    found = finetune.ok("fp16", processes, config=fp16[config], **flags)
    assert [row["loss"] for row in found.rows] == pytest.approx([row["loss"] for row in wanted.rows], rel=2e-3)
    assert found.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-2)  # of unscaled gradients
    assert found.info["strategy"]["mixed_precision"] == "fp16" and ", fp16, " in found.output
    assert {row["loss_scale"] for row in found.rows} == {2.0**16} and found.rows[-1]["overflows"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("config", "processes"), matrix([("fsdp", 2), ("ddp", 2)], rest=[("single", 1)]))
def test_steps_that_overflow_are_those_of_one_process_and_change_nothing_and_a_resume_is_exact(
    finetune, fp16, config, processes
):
    flags = {
        "config": fp16[config],
        "save_steps": 1,
        "save_total_limit": 0,
        "logging_steps": 20,
        "max_steps": 18,
        "method": "lora",
    }
    begin = functools.partial(from_scale, 2.0**30, None)
    whole = finetune("whole", processes, prepare=begin, **flags)
    assert whole.status == 0, whole.output
    overflows, last = [row for row in whole.rows if "grad_norm" not in row], whole.rows[-1]
    steps, count = [row["step"] for row in overflows], len(overflows)
    one = finetune.ok("one", prepare=begin, **flags | {"config": fp16["single"]})
    assert [row["step"] for row in one.rows] == [
        row["step"] for row in whole.rows
    ]  # one for each overflow, and the last
    assert one.rows[-1]["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert steps[:6] == list(range(1, 7)) and steps[-1] < 17, whole.rows  # far too high
    assert [row["loss_scale"] for row in overflows] == [2.0 ** (30 - i) for i in range(count)]
    assert all(row["loss"] > 0 for row in overflows)
    assert (last["loss_scale"], last["overflows"], last["step"]) == (2.0 ** (30 - count), count, 18)
    assert whole.output.count("gradients overflow in fp16: skipped, weights unchanged") == count
    assert "warning: " not in whole.output  # of adapters that stand still, or of weights without a gradient
    before, after = trained(whole, steps[-1] - 1), trained(whole, steps[-1])
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert not all(torch.equal(tensor, trained(whole, 18)[name]) for name, tensor in after.items())

    wanted = trained(whole, 18)
    for step in range(steps[-1] + 1, 19):
        shutil.rmtree(whole.folder / f"checkpoints/step-{step:08d}")
    shutil.rmtree(whole.folder / "final")
    again = finetune.ok("whole", processes, **flags)
    assert f"step-{steps[-1]:08d}" in again.output and again.rows[-1]["loss"] == last["loss"]
    assert {key: again.rows[-1][key] for key in ("loss_scale", "overflows", "grad_norm")}.items() <= last.items()
    found = trained(again, 18)
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[name], found[name]) for name in wanted)
    state = json.loads((again.folder / "checkpoints/step-00000018/state.json").read_text())
    assert state["good_steps"] == 18 - steps[-1] and state["nonfinite_steps"] == 0


@pytest.mark.slow
def test_a_run_that_no_scale_helps_ends_with_an_error(finetune, fp16):
    run = finetune("run", prepare=never_fits, config=fp16["single"])
    assert run.status == 1 and "Traceback" not in run.output and len(run.rows) == 3
    assert "step 3: loss 5." in run.output and "overflow in fp16 even with loss_scale 1\n" in run.output
