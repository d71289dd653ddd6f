"""Settings that are right alone and wrong together: found from the recipe, before any machine is looked at."""

from typing import NamedTuple

from kit.config.recipe import DatasetEntry, Recipe


class Conflict(NamedTuple):
    """One such pair or group; a message names the first of ``fields``."""

    fields: tuple[str, ...]
    found: str
    fix: str


def find_conflicts(recipe: Recipe) -> list[Conflict]:
    """All of them, in the order of the checks."""
    wrong = []
    batch, micro_batch = recipe.global_batch_size, recipe.per_device_train_batch_size
    if batch % micro_batch:
        wrong.append(
            Conflict(
                ("global_batch_size", "per_device_train_batch_size"),
                f"{batch} is not divisible by per_device_train_batch_size {micro_batch}",
                f"try {suggest_batch(batch, micro_batch)}",
            )
        )
    for flag, entries in (("dataset", recipe.dataset), ("eval_dataset", recipe.eval_dataset)):
        if isinstance(entries, list):
            wrong += _of_entries(flag, entries)
    if recipe.streaming:
        wrong += _of_streaming(recipe)
    if recipe.attn_implementation == "varlen" and not recipe.packing:
        found = "varlen without packing"
        wrong.append(Conflict(("attn_implementation", "packing"), found, "--packing, or --attn_implementation sdpa"))
    if recipe.packing and recipe.attn_implementation == "flash_attention_2":
        found = "flash_attention_2 with packing"
        wrong.append(Conflict(("attn_implementation", "packing"), found, "use auto: varlen needs no other package"))
    if recipe.eval_dataset and recipe.eval_split_size:
        wrong.append(
            Conflict(("eval_split_size", "eval_dataset"), "given together with eval_dataset", "keep one of the two")
        )
    wants = [name for name in ("eval_steps", "eval_on_start", "predict_with_generate") if getattr(recipe, name)]
    if wants and not recipe.has_evaluation:
        wrong.append(
            Conflict(
                (wants[0], "eval_dataset", "eval_split_size"),
                "nothing to evaluate on",
                "set eval_dataset or eval_split_size",
            )
        )
    if recipe.adapter_name_or_path and recipe.method == "full":
        wrong.append(
            Conflict(
                ("adapter_name_or_path", "method"),
                "given with method full",
                "use --method lora, or merge it first",
            )
        )
    if recipe.use_dora and recipe.method == "qlora":
        wrong.append(Conflict(("use_dora", "method"), "given with method qlora", "use --method lora, or drop use_dora"))
    return wrong


def _of_entries(flag: str, entries: list[DatasetEntry]) -> list[Conflict]:
    wrong = []
    names = [entry.filled(None, "", {}).name for entry in entries]
    for name in sorted({name for name in names if names.count(name) > 1}):
        fix = "give each a name: {path: ..., name: ...}"
        wrong.append(Conflict((flag,), f"two data sets of the name {name!r}", fix))
    weights = [entry.weight for entry in entries]
    if flag == "eval_dataset" and any(weight is not None for weight in weights):
        wrong.append(Conflict((flag,), "weights, but each evaluation sample counts once", "leave weight out"))
    elif any(weight is None for weight in weights) and any(weight is not None for weight in weights):
        without = ", ".join(name for name, weight in zip(names, weights, strict=True) if weight is None)
        wrong.append(Conflict((flag,), f"some weights are missing: {without}", "give each a weight, or none"))
    elif all(weight == 0 for weight in weights):
        wrong.append(Conflict((flag,), "all weights are 0", "give at least one a weight above 0"))
    return wrong


def _of_streaming(recipe: Recipe) -> list[Conflict]:
    wrong = []
    if recipe.max_steps is None:
        fix = "a stream has no known end: give max_steps"
        wrong.append(Conflict(("streaming", "max_steps"), "without max_steps", fix))
    if recipe.eval_split_size:
        fix = "give an eval_dataset: nothing can be held out of a stream"
        wrong.append(Conflict(("streaming", "eval_split_size"), "with eval_split_size", fix))
    if isinstance(recipe.dataset, list) and len(recipe.dataset) > 1 and recipe.dataset[0].weight is None:
        fix = "give each data set a weight: a stream's size is not known"
        wrong.append(Conflict(("streaming", "dataset"), "several data sets without weights", fix))
    if isinstance(recipe.dataset, list) and recipe.mixing == "tokens":
        fix = "use mixing samples: a stream's lengths are not known beforehand"
        wrong.append(Conflict(("streaming", "mixing"), "with mixing tokens", fix))
    return wrong


def suggest_batch(size: int, unit: int) -> str:
    """The multiples of ``unit`` next to ``size``: ``24 or 32``."""
    below, above = size // unit * unit, -(-size // unit) * unit
    return " or ".join(str(n) for n in dict.fromkeys((below, above)) if n)
