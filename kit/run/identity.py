"""The identity of a run: two starts belong to the same run if settings, data and base model are equal."""

import re
from collections.abc import Mapping
from typing import Any

from kit.config.recipe import IDENTITY, Recipe
from kit.data.feed.order import ARGSORT
from kit.run.record import VERSIONED_PACKAGES


def identity(
    recipe: Recipe, data_fingerprint: str, model_fingerprint: str, permutation: str = ARGSORT
) -> dict[str, Any]:
    """Return the identity of a run: its settings of ``IDENTITY``, the fingerprints of base model and data, its order.

    Args:
        permutation: how an epoch is shuffled, see ``kit.data.feed.order``.
    """
    with_defaults = {"learning_rate": recipe.peak_learning_rate, "beta": recipe.reward_scale or None}
    values = recipe.model_dump(mode="json") | with_defaults
    # The fingerprint of the data knows what else a mapping does: which columns are read, and that the others are not.
    columns = {theirs: ours for theirs, ours in recipe.dataset_columns.items() if ours not in (theirs, "ignore")}
    values["dataset_columns"] = columns
    fingerprints = {"model_fingerprint": model_fingerprint, "data_fingerprint": data_fingerprint}
    return {**{key: values[key] for key in IDENTITY}, **fingerprints, "permutation": permutation}


def rounding(recipe: Recipe) -> dict[str, Any]:
    """Return the settings with which the same steps round differently, so that a resume with others is no exact one."""
    return recipe.model_dump(mode="json", include=set(_ROUNDING))


_ROUNDING = ("per_device_train_batch_size", "torch_compile", "attn_implementation", "tf32")
# The fingerprint has the version of the code that reads rows, too.
OTHER_DATA = "the samples that dataset gives are others, or this version of the kit reads them otherwise"
OTHER_MODEL = "the weights at model_name_or_path are others"
COMMIT = re.compile("[0-9a-f]{40}")  # the fingerprint of a hub id


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the settings in which two identities differ, as text; empty if they belong to the same run."""
    words = {"data_fingerprint": OTHER_DATA, "model_fingerprint": OTHER_MODEL}
    was, now = (str(each.get("model_fingerprint")) for each in (old, new))
    if COMMIT.fullmatch(was) and COMMIT.fullmatch(now):
        words["model_fingerprint"] += f": commit {now}, no longer the one that --model_revision {was} takes"
    changed = [key for key in new if old.get(key) != new[key]]
    # A setting that explains why a fingerprint differs is enough.
    causes = {
        "model_name_or_path": "model_fingerprint",
        "max_train_samples": "data_fingerprint",
        "dedup": "data_fingerprint",
    }
    explained = {fingerprint for setting, fingerprint in causes.items() if setting in changed}
    changed = [key for key in changed if key not in explained]
    return [words.get(key) or f"{key}: {old.get(key)!r} -> {new[key]!r}" for key in changed]


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line that names what changed since a checkpoint and affects rounding; an empty list if nothing did.

    Args:
        old: the checkpoint's manifest; its ``strategy``, ``versions`` and ``rounding`` are used.
        new: the same of this start.
    """
    keys = ("type", "num_processes", "num_replicas", "mixed_precision", "device", "num_threads")
    pairs = [(key, old["strategy"].get(key), new["strategy"][key]) for key in keys]
    pairs += [(name, old["versions"].get(name), new["versions"][name]) for name in VERSIONED_PACKAGES]
    pairs += [(name, old.get("rounding", {}).get(name), value) for name, value in new["rounding"].items()]
    changed = ", ".join(f"{name} {was} -> {now}" for name, was, now in pairs if was != now)
    return [f"note: changed since that checkpoint: {changed}; steps from here on round differently"] if changed else []
