"""The identity of a run: two starts belong to the same run if settings, data and base model are equal."""

import re
from collections.abc import Mapping
from typing import Any

from kit.config.recipe import IDENTITY, Recipe


def identity(
    recipe: Recipe, data_fingerprint: str, model_fingerprint: str, teacher_fingerprint: str | None = None
) -> dict[str, Any]:
    """Return the identity of a run: its settings of ``IDENTITY``, and the fingerprints of its models and its data."""
    with_defaults = {"learning_rate": recipe.peak_learning_rate, "beta": recipe.reward_scale or None}
    values = recipe.model_dump(mode="json") | with_defaults
    # The rest of a mapping, which columns are read and which are not, is in the fingerprint of the data.
    columns = {theirs: ours for theirs, ours in recipe.dataset_columns.items() if ours not in (theirs, "ignore")}
    values["dataset_columns"] = columns
    fingerprints = {"model_fingerprint": model_fingerprint, "data_fingerprint": data_fingerprint}
    if teacher_fingerprint:
        fingerprints["teacher_fingerprint"] = teacher_fingerprint
    of_rollouts = {"max_new_tokens": recipe.max_new_tokens} if recipe.rolls_out else {}
    return {**{key: values[key] for key in IDENTITY}, **of_rollouts, **fingerprints}


# Settings that change only rounding: after a change, resuming is not bit for bit.
ROUNDING = {"per_device_train_batch_size", "torch_compile", "attn_implementation", "experts_implementation", "tf32"}
# The fingerprint has the version of the code that reads rows, too.
OTHER_DATA = "the samples of dataset changed, or this version of the kit reads them differently"
OTHER_TEACHER = "the weights of teacher changed"
OTHER_MODEL = "the weights of model_name_or_path changed"
COMMIT = re.compile("[0-9a-f]{40}")  # the fingerprint of a hub id


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the settings in which two identities differ, as text; empty if they belong to the same run."""
    words = {"data_fingerprint": OTHER_DATA, "model_fingerprint": OTHER_MODEL, "teacher_fingerprint": OTHER_TEACHER}
    for kind in ("model", "teacher"):
        was, now = (str(each.get(f"{kind}_fingerprint")) for each in (old, new))
        if COMMIT.fullmatch(was) and COMMIT.fullmatch(now):
            words[f"{kind}_fingerprint"] += (
                f": commit {now}, not the earlier one, which --{kind}_revision {was} selects"
            )
    changed = [key for key in new if old.get(key) != new[key]]
    return [words.get(key) or f"{key}: {old.get(key)!r} -> {new[key]!r}" for key in changed]


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences between two starts, from the keys that both records have: ``eval_steps: 0 -> 10``.

    A record is ``run.json`` with the recipe, or the manifest of a checkpoint with the settings that round.
    """
    found = []
    for part in ("recipe", "rounding", "strategy", "versions", "own_code"):
        before, now = old.get(part, {}), new.get(part, {})
        keys = [key for key in (_STRATEGY if part == "strategy" else now) if key in before and key not in _OF_ONE_START]
        changed = [key for key in keys if before[key] != now[key]]
        found += [f"{'strategy' if key == 'type' else key}: {before[key]} -> {now[key]}" for key in changed]
    return found


_STRATEGY = (
    "type",
    "num_processes",
    "num_replicas",
    "sequence_parallel_size",
    "mixed_precision",
    "device",
    "num_threads",
)
# Settings of a single start. They say nothing about the steps that follow.
_OF_ONE_START = ("resume_from_checkpoint", "overwrite_output_dir")
