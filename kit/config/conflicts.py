"""Find settings that are valid one by one but not together. Needs only the recipe, not the machine."""

from typing import NamedTuple

from kit.config.recipe import DatasetEntry, Recipe


class Conflict(NamedTuple):
    """Settings that cannot be used together."""

    fields: tuple[str, ...]  # the settings; the message names the first one
    found: str
    fix: str


def find_conflicts(recipe: Recipe) -> list[Conflict]:
    """Return all conflicts in ``recipe``."""
    conflicts = []
    batch, micro_batch = recipe.global_batch_size, recipe.per_device_train_batch_size
    if batch % micro_batch:
        conflicts.append(
            Conflict(
                ("global_batch_size", "per_device_train_batch_size"),
                f"{batch} is not divisible by per_device_train_batch_size {micro_batch}",
                f"try {suggest_batch(batch, micro_batch)}",
            )
        )
    for flag, entries in (("dataset", recipe.dataset), ("eval_dataset", recipe.eval_dataset)):
        if isinstance(entries, list):
            conflicts += _conflicts_of_entries(flag, entries)
    if recipe.streaming:
        conflicts += _conflicts_of_streaming(recipe)
    if recipe.attn_implementation == "varlen" and not recipe.packing:
        found = "varlen without packing"
        conflicts.append(
            Conflict(("attn_implementation", "packing"), found, "--packing, or --attn_implementation sdpa")
        )
    if recipe.packing and recipe.attn_implementation == "flash_attention_2":
        found = "flash_attention_2 with packing"
        conflicts.append(Conflict(("attn_implementation", "packing"), found, "use auto: varlen needs no other package"))
    if recipe.eval_dataset and recipe.eval_split_size:
        conflicts.append(
            Conflict(("eval_split_size", "eval_dataset"), "given together with eval_dataset", "keep one of the two")
        )
    needing_data = [name for name in ("eval_steps", "eval_on_start", "predict_with_generate") if getattr(recipe, name)]
    if needing_data and not recipe.has_evaluation:
        conflicts.append(
            Conflict(
                (needing_data[0], "eval_dataset", "eval_split_size"),
                "nothing to evaluate on",
                "set eval_dataset or eval_split_size",
            )
        )
    if recipe.adapter_name_or_path and recipe.method == "full":
        conflicts.append(
            Conflict(
                ("adapter_name_or_path", "method"),
                "given with method full",
                "use --method lora, or merge it first",
            )
        )
    for name in ("new_tokens", "trainable_tokens", "lora_modules_to_save"):
        if recipe.adapter_name_or_path and getattr(recipe, name):
            found = "given with adapter_name_or_path: what that adapter trains is kept"
            conflicts.append(
                Conflict((name, "adapter_name_or_path"), found, "leave one out, or merge the adapter first")
            )
    if recipe.use_dora and recipe.method == "qlora":
        conflicts.append(
            Conflict(("use_dora", "method"), "given with method qlora", "use --method lora, or drop use_dora")
        )
    return conflicts


def _conflicts_of_entries(flag: str, entries: list[DatasetEntry]) -> list[Conflict]:
    conflicts = []
    names = [entry.filled(None, "", {}).name for entry in entries]
    for name in sorted({name for name in names if names.count(name) > 1}):
        fix = "give each a name: {path: ..., name: ...}"
        conflicts.append(Conflict((flag,), f"two data sets of the name {name!r}", fix))
    weights = [entry.weight for entry in entries]
    if flag == "eval_dataset" and any(weight is not None for weight in weights):
        conflicts.append(Conflict((flag,), "weights, but each evaluation sample counts once", "leave weight out"))
    elif any(weight is None for weight in weights) and any(weight is not None for weight in weights):
        without = ", ".join(name for name, weight in zip(names, weights, strict=True) if weight is None)
        conflicts.append(Conflict((flag,), f"some weights are missing: {without}", "give each a weight, or none"))
    elif all(weight == 0 for weight in weights):
        conflicts.append(Conflict((flag,), "all weights are 0", "give at least one a weight above 0"))
    return conflicts


def _conflicts_of_streaming(recipe: Recipe) -> list[Conflict]:
    conflicts = []
    if recipe.max_steps is None:
        fix = "a stream has no known end: give max_steps"
        conflicts.append(Conflict(("streaming", "max_steps"), "without max_steps", fix))
    if recipe.eval_split_size:
        fix = "give an eval_dataset: nothing can be held out of a stream"
        conflicts.append(Conflict(("streaming", "eval_split_size"), "with eval_split_size", fix))
    if isinstance(recipe.dataset, list) and len(recipe.dataset) > 1 and recipe.dataset[0].weight is None:
        fix = "give each data set a weight: a stream's size is not known"
        conflicts.append(Conflict(("streaming", "dataset"), "several data sets without weights", fix))
    if isinstance(recipe.dataset, list) and recipe.mixing == "tokens":
        fix = "use mixing samples: a stream's lengths are not known beforehand"
        conflicts.append(Conflict(("streaming", "mixing"), "with mixing tokens", fix))
    return conflicts


def suggest_batch(size: int, unit: int) -> str:
    """Return the multiples of ``unit`` below and above ``size``, as text: ``24 or 32``."""
    below, above = size // unit * unit, -(-size // unit) * unit
    return " or ".join(str(n) for n in dict.fromkeys((below, above)) if n)
