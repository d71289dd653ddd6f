"""What is scored is what was named: base, adapter, checkpoint; mistakes are reported in words."""

import json

import pytest
from helpers import export, make_model, matrix


def loss(run):
    assert run.status == 0, run.output
    return json.loads(run.output.splitlines()[-1])["eval_loss"]


def refusal(run):
    assert run.status == 2 and "Traceback" not in run.output and run.output.count("error:") == 1, run.output
    return run.output


@pytest.fixture
def flags(fp32, chat_file):
    return {"config": fp32["single"], "max_length": 256, "eval_dataset": chat_file, "max_eval_samples": 9}


@pytest.mark.slow
def test_an_adapter_is_scored_on_the_base_given_with_it(finetune, fp32, flags, model_folder, tmp_path):
    run = finetune.ok("run", config=fp32["single"], max_steps=3)
    final = run.folder / "final"
    base = loss(finetune.score("base", model_name_or_path=model_folder, **flags))
    adapted = loss(finetune.score("adapter", model_name_or_path=final, **flags))
    both = {"model_name_or_path": model_folder, "adapter_name_or_path": final}
    assert loss(finetune.score("both", **both, **flags)) == adapted < base
    assert loss(finetune.score("4-bit", **both, method="qlora", **flags)) != adapted
    other = make_model(tmp_path / "other", hidden_size=64)
    assert "does not fit" in refusal(finetune.score("other", **both | {"model_name_or_path": other}, **flags))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "processes", "method"),
    matrix([("fsdp", 2, "lora"), ("single", 1, "full")]),
)
def test_a_checkpoint_is_scored_whatever_the_optimiser_was(finetune, fp32, flags, config, processes, method):
    run = finetune.ok("run", config=fp32["single"], method=method, max_steps=3, optim="adamw_8bit")
    flags["config"] = fp32[config]
    final = loss(finetune.score("final", processes, model_name_or_path=run.folder / "final", **flags))
    checkpoint = run.folder / "checkpoints/step-00000003"
    scored = loss(finetune.score("checkpoint", processes, model_name_or_path=checkpoint, **flags))
    assert scored == pytest.approx(final, rel=1e-5)


@pytest.mark.slow
def test_an_adapter_is_asked_as_it_was_trained(finetune, fp32, flags, tmp_path):
    """With the chat template in its folder: the base has none, or another."""
    base = make_model(tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    of_base = {"model_name_or_path": base, "config": fp32["single"]}
    final = finetune.ok("run", **of_base, chat_template="alpaca", max_steps=3).folder / "final"
    export(final, tmp_path / "merged", "--dtype=float32")
    expected = pytest.approx(loss(finetune.score("merged", model_name_or_path=tmp_path / "merged", **flags)), rel=1e-5)
    checkpoint = final.parent / "checkpoints/step-00000003"
    both = {"model_name_or_path": base, "adapter_name_or_path": final}
    assert loss(finetune.score("both", **both, **flags)) == expected
    assert loss(finetune.score("checkpoint", model_name_or_path=checkpoint, **flags)) == expected
    assert loss(finetune.score("given", **both, chat_template="chatml", **flags)) != expected


@pytest.mark.slow
def test_a_dry_run_checks_and_scores_nothing(finetune, flags, model_folder):
    run = finetune.score("dry", model_name_or_path=model_folder, dry_run=True, **flags)
    assert run.status == 0 and "9 samples would be scored" in run.output and "eval_loss" not in run.output
