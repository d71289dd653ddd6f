"""A run resumes after any checkpoint bit for bit in the same topology."""

import shutil

import pytest
from helpers import matrix

pytestmark = pytest.mark.slow

DROPOUT = {"method": "lora", "lora_dropout": 0.1, "save_steps": 3, "max_steps": 6, "save_total_limit": 0}


def interrupt_after(run, step, copy):
    """A copy of a run's folder as it was when the checkpoint of ``step`` was its last."""
    shutil.copytree(run.folder, copy)
    for path in (copy / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    shutil.rmtree(copy / "final")


@pytest.mark.long
def test_half_a_run_continued_equals_the_whole_run_bit_for_bit(finetune):
    """Other strategies, methods and feeds: the covering array."""
    flags = DROPOUT | {"config": "fsdp_hybrid", "method": "qlora", "per_device_train_batch_size": 1}
    whole = finetune.ok("whole", 4, **flags)
    interrupt_after(whole, 3, finetune.folder / "half")
    half = finetune.ok("half", 4, **flags)
    assert "continuing after step 3 of 6" in half.output
    assert [row["step"] for row in half.rows] == list(range(1, 7))
    assert half.losses == whole.losses
    assert [n.hex() for n in half.grad_norms] == [n.hex() for n in whole.grad_norms]
    weights = [next((run.folder / "final").glob("*model.safetensors")).read_bytes() for run in (whole, half)]
    assert weights[0] == weights[1]


def clock_of_rank_1_alone(rank):
    from kit.checkpoint import save

    save.SAVE_SECONDS = 0 if rank == 1 else 10**9


def test_saves_by_time_are_of_all_ranks_and_change_nothing_that_is_learned(finetune):
    flags = DROPOUT | {"config": "ddp", "save_steps": "auto", "max_steps": 4}
    plain = finetune.ok("plain", 2, **flags)
    assert len(list((plain.folder / "checkpoints").iterdir())) == 1
    whole = finetune.ok("whole", 2, prepare=clock_of_rank_1_alone, **flags)
    assert whole.losses == plain.losses
    interrupt_after(whole, 2, finetune.folder / "half")
    assert len(list((finetune.folder / "half/checkpoints").iterdir())) == 2
    assert finetune.ok("half", 2, **flags).losses == plain.losses


# The first has another feed; what is fed does not depend on the strategy.
MOVES = [
    (("fsdp", 2), ("single", 1), {"method": "lora", "packing": True}),
    (("ddp", 2), ("fsdp", 2), {"method": "full"}),
    (("single", 1), ("fsdp1", 2), {"method": "full"}),
    (("fsdp_hybrid", 4), ("fsdp", 4), {"method": "full"}),
    (("ddp", 2), ("fsdp_hybrid", 4), {"method": "full", "streaming": True}),
]


@pytest.mark.parametrize(("first", "second", "data"), matrix(MOVES))
def test_a_checkpoint_of_one_strategy_continues_under_another(finetune, fp32, first, second, data):
    flags = DROPOUT | {"lora_dropout": 0.0, "learning_rate": 2e-3, **data}
    whole = finetune.ok("whole", first[1], config=fp32[first[0]], **flags)
    interrupt_after(whole, 3, finetune.folder / "half")
    half = finetune.ok("half", second[1], config=fp32[second[0]], **flags)
    assert half.info["strategy"]["type"].removesuffix("2") == second[0].removesuffix("_hybrid")
    assert [row["loss"] for row in half.rows] == pytest.approx([row["loss"] for row in whole.rows], rel=1e-6)
    for exact in ("step", "learning_rate", "epoch", "tokens", "supervised_tokens"):
        assert [row[exact] for row in half.rows] == [row[exact] for row in whole.rows]


def test_a_finished_run_is_left_alone_until_more_steps_are_asked_for(finetune):
    flags = {"lr_scheduler_type": "constant", "warmup_steps": 0}
    run = finetune.ok("run", max_steps=2, **flags)
    before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*") if path.is_file()}
    assert "this run is finished" in finetune.ok("run", max_steps=2, **flags).output
    assert {path: path.stat().st_mtime_ns for path in run.folder.rglob("*") if path.is_file()} == before
    more = finetune.ok("run", max_steps=4, **flags)
    assert more.losses == finetune.ok("straight", max_steps=4, **flags).losses
    shutil.rmtree(run.folder / "checkpoints")
    assert "this run is finished" in finetune.ok("run", max_steps=4, **flags).output
    refused = finetune("run", max_steps=5, **flags)
    assert refused.status == 2 and "no checkpoint to resume from" in refused.output
    emptied = finetune.ok("run", max_steps=1, lora_r=4, overwrite_output_dir="true", **flags)
    assert emptied.info["recipe"]["lora_r"] == 4 and len(emptied.rows) == 1


def test_the_checkpoint_of_the_lowest_eval_loss_outlives_newer_ones_through_a_resume(finetune, chat_file):
    flags = {"eval_dataset": chat_file, "eval_steps": 1, "max_eval_samples": 8, "keep_best": "true"}
    flags |= {"save_total_limit": 1, "method": "full"}
    flags |= {"lr_scheduler_type": "constant", "learning_rate": 1.0, "warmup_steps": 8}
    finetune.ok("run", max_steps=8, **flags)  # diverges as the rate rises
    run = finetune.ok("run", max_steps=10, **flags)
    losses = {row["step"]: row["eval_loss"] for row in run.rows if "eval_loss" in row}
    best = min(losses, key=lambda step: losses[step])
    assert 0 < best < 8, losses
    kept = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert kept == [f"step-{best:08d}", "step-00000010"]
    assert f"lowest eval_loss: {losses[best]:.4f} after step {best}" in run.output


def test_the_end_of_early_stopping_is_an_end_through_a_resume(finetune, chat_file):
    """The rate is so high that the run diverges."""
    flags = {"eval_dataset": chat_file, "eval_steps": 1, "max_eval_samples": 8, "early_stopping_patience": 3}
    flags |= {"save_steps": 1, "save_total_limit": 0, "method": "full", "max_steps": 30}
    flags |= {"lr_scheduler_type": "constant", "learning_rate": 1.0, "warmup_steps": 8}
    whole = finetune.ok("whole", **flags)
    losses = [row["eval_loss"] for row in whole.rows if "eval_loss" in row]
    end = len(losses)
    assert losses.index(min(losses)) == end - 4 and end < 30
    assert whole.info["ended_early"] == "eval_loss did not fall in the last 3 evaluations"
    assert whole.info["finished_steps"] == end and f"ended early, after step {end} of 30" in whole.output
    assert "this run is finished" in finetune.ok("whole", **flags).output
    interrupt_after(whole, end, finetune.folder / "ended")  # killed before it wrote the final model
    ended = finetune.ok("ended", **flags)
    assert ended.losses == whole.losses and (ended.folder / "final/model.safetensors").is_file()
    more = finetune.ok("whole", **flags | {"early_stopping_patience": 4})
    assert more.info["finished_steps"] == end + 1 and more.losses[:end] == whole.losses
