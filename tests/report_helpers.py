"""Forged runs for a report."""

import json

from helpers import actual_strategy

from kit.config.recipe import Recipe
from kit.tools.report.runs import read_reported_run


def record(**changes):
    """The ``run.json`` of a run of four steps that has not ended."""
    data = {"fingerprint": "ab", "train": {"num_samples": 7}, "evaluation": {"fingerprint": "ef", "num_samples": 400}}
    data["sources"] = [{"name": "one", "num_samples": 7}]
    settings = Recipe(model_name_or_path="m", method="lora", dataset="<b>.jsonl", max_steps=9).model_dump(mode="json")
    values = {"recipe": settings, "strategy": actual_strategy().record(), "data": data, "versions": {"torch": "2.13.0"}}
    return values | {"total_steps": 9} | changes


def step_row(step, **changes):
    """A line of the metrics about a step."""
    row = {"step": step, "loss": 5 - step / 10, "grad_norm": 0.5, "learning_rate": 1e-3, "tokens_per_second": 90.0}
    row |= {"seconds": 2.0 * step, "peak_memory_bytes": 2**30, "data_wait_share": 0.01, "padding_share": 0.125}
    return row | changes


def evaluation_row(step, **changes):
    """A line of the metrics about an evaluation."""
    row = {"step": step, "eval_loss": 2.25, "eval_exact_match": 0.5, "intervals": {"eval_exact_match": [0.4, 0.6]}}
    return row | {"seconds": 2.0 * step} | changes


def pair_evaluation(step, accuracy, logps=-40.0):
    """A line of the metrics about an evaluation of pairs."""
    row = {"step": step, "eval_loss": 0.5, "eval_rewards/accuracies": accuracy, "eval_rewards/margins": 0.75}
    return row | {"eval_logps/chosen": logps, "eval_lengths/chosen": 20.0}


GRPO = {"objective": "grpo", "rewards": ["exact_match", "overlong:8"]}


def rollout_row(step, **changes):
    """A line of the metrics about a step that learned from two answers of its own."""
    shown = [{"prompt": f"ask {step}", "reference": "<yes>", "text": text, "reward": 0.5} for text in ("no", "maybe")]
    return step_row(step, reward=step / 100, **{"rewards/exact_match": 0.5, "rollout": shown, **changes})


def make_run(folder, rows=None, recipe=None, **changes):
    """Writes what a run leaves; ``recipe`` are settings, ``changes`` of ``run.json``. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    values = record(**changes)
    values["recipe"] = values["recipe"] | (recipe or {})
    (folder / "run.json").write_text(json.dumps(values))
    rows = [*map(step_row, range(1, 5)), evaluation_row(4)] if rows is None else rows
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def opened(folder, rows=None, **changes):
    """The same, as a report reads it."""
    return read_reported_run(make_run(folder, rows, **changes))
