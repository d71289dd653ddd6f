"""Samples looked at as `kit inspect` does, and forged runs for a report."""

import json

from data_helpers import open_all, recipe
from helpers import actual_strategy

from kit.config.recipe import Recipe
from kit.tools.report.runs import read_reported_run
from kit.tools.report.samples_page import gather_samples


def looked(tokenizer, num_samples=5, **flags):
    data = open_all(tokenizer, **flags)
    return gather_samples(recipe(**flags), tokenizer, data, data.notes, num_samples)


def checks(gathered):
    return {text: verdict for verdict, text, *_ in gathered.checks}


def record(**changes):
    """The ``run.json`` of a run of four steps that has not ended."""
    data = {"fingerprint": "ab", "train": {"num_samples": 7}, "evaluation": {"fingerprint": "ef", "num_samples": 3}}
    data["sources"] = [{"name": "one", "num_samples": 7}]
    settings = Recipe(model_name_or_path="m", method="lora", dataset="<b>.jsonl", max_steps=9).model_dump(mode="json")
    values = {"recipe": settings, "strategy": actual_strategy().record(), "data": data, "versions": {"torch": "2.13.0"}}
    return values | {"total_steps": 9} | changes


def step_row(step, **changes):
    """A line of the metrics about a step."""
    row = {"step": step, "loss": 5 - step / 2, "grad_norm": 0.5, "learning_rate": 1e-3, "tokens_per_second": 90.0}
    row |= {"tokens_seen": 100 * step, "seconds": 2.0 * step, "peak_memory_bytes": 2**30}
    return row | {"data_wait_share": 0.01, "padding_share": 0.125} | changes


def evaluation_row(step, **changes):
    """A line of the metrics about an evaluation."""
    row = {"step": step, "eval_loss": 2.25, "eval_perplexity": 9.4877, "eval_tokens": 11, "eval_exact_match": 0.5}
    return row | {"tokens_seen": 100 * step, "seconds": 2.0 * step} | changes


REWARDS = {"rewards/chosen": 0.25, "rewards/rejected": -0.5, "rewards/margins": 0.75, "rewards/accuracies": 0.875}
OF_PAIRS = {**REWARDS, "logps/chosen": -40.0, "logps/rejected": -60.0, "lengths/chosen": 20.0, "lengths/rejected": 21.0}


def pair_row(step, **changes):
    """A line of the metrics about a step on pairs; its loss falls."""
    row = step_row(step, loss=0.7 - step / 100, objective="DirectPreference", **OF_PAIRS)
    return row | {key.replace("__", "/"): value for key, value in changes.items()}


def pair_evaluation(step, **changes):
    """A line of the metrics about an evaluation of pairs."""
    row = {"step": step, "eval_loss": 0.5, "eval_tokens": 11, "tokens_seen": 100 * step, "seconds": 2.0 * step}
    changes = {key.replace("__", "/"): value for key, value in changes.items()}
    return row | {f"eval_{key}": value for key, value in (OF_PAIRS | changes).items()}


def opened_pairs(folder, rows, num_evaluated=400, settings=None, **changes):
    """A run on pairs as a report reads it, by default of dpo; ``settings`` are of the recipe."""
    values = record(**changes)
    values["recipe"] |= {"objective": "dpo", **(settings or {})}
    values["data"]["evaluation"]["num_samples"] = num_evaluated
    return opened(folder, rows, **values)


def make_run(folder, rows=None, **changes):
    """Writes what a run leaves; the changes are of ``run.json``. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(record(**changes)))
    rows = [*map(step_row, range(1, 5)), evaluation_row(4)] if rows is None else rows
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def opened(folder, rows=None, **changes):
    """The same, as a report reads it."""
    return read_reported_run(make_run(folder, rows, **changes))
