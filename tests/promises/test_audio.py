"""Training on audio: the same on every topology, also where a rank has none; and continued bit for bit."""

import shutil

import pytest
from audio_models import write_rows
from helpers import matrix

pytestmark = pytest.mark.slow

# Of two ranks, one often has no sound in its micro-batch.
ROWS = [[0.7], [], [0.4, 0.9], [], [0.33], [0.5, 0.25, 0.6], []] * 3
FLAGS = {"method": "full", "train_only": "audio,projector,language", "global_batch_size": 6, "max_steps": 6}
FLAGS["max_length"] = 2048  # a sound is 375 tokens of Voxtral


def losses(run):
    return [row["loss"] for row in run.rows if "loss" in row]


@pytest.mark.parametrize("family", matrix(["qwen2_audio", "qwen3_asr", "voxtral"]))
def test_ranks_with_and_without_sounds_compute_what_one_process_computes(family, finetune, fp32, audio_model, tmp_path):
    data = write_rows(tmp_path, ROWS)
    flags = FLAGS | {"model_name_or_path": audio_model(family), "dataset": data, "eval_split_size": 5}
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


def test_a_run_on_audio_continues_bit_for_bit_packed_with_rows_of_text(finetune, fp32, audio_model, tmp_path):
    flags = FLAGS | {"model_name_or_path": audio_model("qwen2_audio"), "dataset": write_rows(tmp_path, ROWS)}
    flags |= {"packing": True, "global_batch_size": 2, "max_length": 128, "save_steps": 3}
    whole = finetune.ok("whole", config=fp32["single"], **flags)
    half = shutil.copytree(whole.folder, finetune.folder / "half")
    shutil.rmtree(half / "final")
    for checkpoint in sorted((half / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(checkpoint)
    again = finetune.ok("half", config=fp32["single"], **flags)
    assert "continuing after step 3 of 6" in again.output
    assert again.losses == whole.losses and again.grad_norms == whole.grad_norms
