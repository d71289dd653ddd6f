"""Training on images: the same on every topology, also where a rank has none; and continued bit for bit."""

import json
import shutil

import pytest
import torch
from helpers import matrix
from safetensors.torch import load_file, save_file
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


@pytest.mark.parametrize("family", matrix(["qwen2_vl", "gemma3"]))
def test_a_teacher_sees_the_images_that_its_student_sees(family, finetune, fp32, vision_model, tmp_path):
    student = vision_model(family)
    teacher = shutil.copytree(student, tmp_path / "teacher")
    torch.manual_seed(1)
    weights = {
        name: each + 0.1 * torch.randn(each.shape) for name, each in load_file(student / "model.safetensors").items()
    }
    save_file(weights, teacher / "model.safetensors", {"format": "pt"})
    flags = FLAGS | {"model_name_or_path": student, "dataset": write_rows(tmp_path, ROWS), "objective": "distil"}
    flags |= {"train_only": None, "max_steps": 3, "learning_rate": 1e-4}
    (row,) = finetune.ok("same", config=fp32["single"], **flags | {"teacher": student, "max_steps": 1}).rows
    assert row["divergence"] == pytest.approx(0, abs=1e-6) and row["teacher_agreement"] == 1.0
    flags["teacher"] = teacher
    whole = finetune.ok("single", config=fp32["single"], **flags)
    assert whole.rows[0]["divergence"] > 0.1
    for name, changes in (("fsdp", {}), ("ddp", {"teacher_top_k": 10**6, "packing": family == "qwen2_vl"})):
        run = finetune.ok(name, 2, config=fp32[name], per_device_train_batch_size=1, **flags | changes)
        if not changes.get("packing"):
            assert losses(run) == pytest.approx(losses(whole), rel=1e-6), name
        else:
            packed = finetune.ok("packed", config=fp32["single"], **flags | {"packing": True})
            assert losses(run) == pytest.approx(losses(packed), rel=1e-6), name
    processor = json.loads((teacher / "preprocessor_config.json").read_text())
    (teacher / "preprocessor_config.json").write_text(json.dumps(processor | {"image_mean": [0.1, 0.2, 0.3]}))
    run = finetune("refused", config=fp32["single"], **flags)
    assert run.status == 2 and "teacher reads images or audio otherwise than the student" in run.output, run.output
