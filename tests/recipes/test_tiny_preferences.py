"""The embedded preferences: a right record beside a wrong one, from which the tiny model visibly learns."""

import json

import pytest
from helpers import ROOT

TINY = ROOT / "recipes/tiny"


@pytest.mark.slow
def test_a_few_steps_of_the_recipe_raise_margin_accuracy_and_exact_match(finetune):
    finetune.defaults = {"recipe": "tiny-dpo"}
    run = finetune.ok("run", max_steps=12, warmup_steps=2, max_eval_samples=32)
    before, *_, after = (row for row in run.rows if "eval_exact_match" in row)
    assert abs(before["eval_rewards/margins"]) < 1e-5  # the model is the reference
    assert after["eval_rewards/margins"] > 0.02 and after["eval_rewards/accuracies"] > 0.8
    assert after["eval_exact_match"] > before["eval_exact_match"] + 0.2
    for path in ("final", "checkpoints/step-00000012"):  # the reference is the adapter it began with, not the base
        flags = {"model_name_or_path": run.folder / path, "eval_dataset": TINY / "eval_pairs.jsonl"}
        scored = finetune.score("scored", **flags, max_eval_samples=32)
        assert scored.status == 0 and f"reference model: {TINY / 'sft'}\n" in scored.output, scored.output
        found = json.loads(scored.output.splitlines()[-1])
        assert found["eval_rewards/margins"] == pytest.approx(after["eval_rewards/margins"], rel=1e-4)
