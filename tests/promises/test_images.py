"""Training on images: the same on every topology, also where a rank has none; and continued bit for bit."""

import json
import shutil

import pytest
from helpers import matrix
from vision_models import write_rows

pytestmark = pytest.mark.slow

# Of two ranks, one often has no image in its micro-batch.
ROWS = [[(70, 50)], [], [(70, 50), (120, 60)], [], [(40, 90)], [(30, 30), (200, 60), (70, 50)], []] * 3
FLAGS = {"method": "full", "train_only": "vision,projector,language", "global_batch_size": 6, "max_steps": 6}


def losses(run):
    return [row["loss"] for row in run.rows if "loss" in row]


@pytest.mark.parametrize("family", matrix(["qwen2_vl", "qwen3_vl", "gemma3"]))
def test_ranks_with_and_without_images_compute_what_one_process_computes(
    family, finetune, fp32, vision_model, tmp_path
):
    data = write_rows(tmp_path, ROWS)
    flags = FLAGS | {"model_name_or_path": vision_model(family), "dataset": data, "eval_split_size": 5}
    flags |= {"predict_with_generate": True, "max_new_tokens": 4}
    answers = []
    for name, processes, size in (("single", 1, 6), ("fsdp", 2, 1), ("ddp", 2, 3)):
        run = finetune.ok(name, processes, config=fp32[name], per_device_train_batch_size=size, **flags)
        answers.append([row["eval_loss"] for row in run.rows if "eval_loss" in row])
        if name == "single":
            whole = run
        assert losses(run) == pytest.approx(losses(whole), rel=1e-6)
        assert run.grad_norms == pytest.approx(whole.grad_norms, rel=1e-5)
        assert answers[-1] == pytest.approx(answers[0], rel=1e-5)


def test_a_run_on_packs_of_pairs_with_images_continues_bit_for_bit(finetune, vision_model, tmp_path):
    rows = [json.loads(line) for line in write_rows(tmp_path, ROWS).read_text().splitlines()]
    pairs = [
        {"prompt": asked, "chosen": answer["content"], "rejected": "no"}
        for asked, answer in (r["messages"] for r in rows)
    ]
    for pair in pairs:
        pair["prompt"] = [pair["prompt"]]
        pair |= {key: [{"role": "assistant", "content": pair[key]}] for key in ("chosen", "rejected")}
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    flags = {"model_name_or_path": vision_model("gemma3"), "dataset": data, "method": "lora", "objective": "dpo"}
    flags |= {"packing": True, "max_length": 128, "global_batch_size": 2, "per_device_train_batch_size": 1}
    flags |= {"save_steps": 2, "max_steps": 4, "save_total_limit": 0, "learning_rate": 1e-3}
    whole = finetune.ok("whole", **flags)
    shutil.copytree(whole.folder, finetune.folder / "half")
    shutil.rmtree(finetune.folder / "half/checkpoints/step-00000004")
    shutil.rmtree(finetune.folder / "half/final")
    half = finetune.ok("half", **flags)
    assert "continuing after step 2 of 4" in half.output
    assert half.losses == whole.losses


@pytest.mark.parametrize("family", matrix(["gemma3", "qwen3_vl"], always=0))
def test_rollouts_of_prompts_with_images_are_the_same_on_every_topology(family, finetune, fp32, vision_model, tmp_path):
    (tmp_path / "own.py").write_text(
        "def letters(expected, answer, row):\n    return sum(map(ord, answer)) % 97 / 97\n"
    )
    flags = {"model_name_or_path": vision_model(family), "dataset": write_rows(tmp_path, ROWS), "objective": "grpo"}
    flags |= {"rewards": f"{tmp_path / 'own.py'}:letters", "num_generations": 3, "global_batch_size": 12}
    flags |= {"max_new_tokens": 8, "num_iterations": 2, "max_steps": 4, "save_steps": 2, "save_total_limit": 0}
    whole = finetune.ok("whole", config=fp32["single"], per_device_train_batch_size=6, **flags)
    assert all(row["reward"] > 0 for row in whole.rows) and min(whole.grad_norms) > 0
    for name, processes, size in (("fsdp", 2, 3), ("ddp", 2, 6)):
        run = finetune.ok(name, processes, config=fp32[name], per_device_train_batch_size=size, **flags)
        assert losses(run) == pytest.approx(losses(whole), rel=1e-5, abs=1e-6)
        assert run.grad_norms == pytest.approx(whole.grad_norms, rel=1e-4)
        assert [row["reward"] for row in run.rows] == [row["reward"] for row in whole.rows]
    shutil.copytree(whole.folder, finetune.folder / "half")
    shutil.rmtree(finetune.folder / "half/checkpoints/step-00000004")
    shutil.rmtree(finetune.folder / "half/final")
    half = finetune.ok("half", config=fp32["single"], per_device_train_batch_size=6, **flags)
    assert "continuing after step 2 of 4" in half.output and half.losses == whole.losses
