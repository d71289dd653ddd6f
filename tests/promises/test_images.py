"""Training on images: the same on every topology, also where a rank has none; and continued bit for bit."""

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
