"""Find settings that are valid one by one but not together. Needs only the recipe, not the machine."""

from collections.abc import Mapping
from dataclasses import dataclass

from kit.config.dataset_entry import DatasetEntry
from kit.config.recipe import Recipe
from kit.config.settings.evaluation import EvalSettings
from kit.config.settings.method import MethodSettings
from kit.config.settings.optimisation import OptimSettings
from kit.errors import Problem


@dataclass(frozen=True)
class Conflict:
    """Settings that cannot be used together.

    Unlike a ``Problem`` it has the keys of all settings that take part, so that it is not reported where one of them is
    wrong by itself; and it does not know where they were given.
    """

    keys: tuple[str, ...]  # the message names the first one
    found: str
    fix: str

    def problem(self, where: Mapping[str, str]) -> Problem:
        """Return the problem to report. ``where``: what to call each key in a message, such as ``file:line key``."""
        return Problem(where.get(self.keys[0], self.keys[0]), self.found, fix=self.fix)


def find_conflicts(recipe: Recipe) -> list[Conflict]:
    """Return all conflicts in ``recipe``."""
    conflicts = _conflicts_of_batch(recipe) + _conflicts_of_datasets(recipe)
    if recipe.streaming:
        conflicts += _conflicts_of_streaming(recipe)
    conflicts += _conflicts_of_attention(recipe)
    conflicts += _conflicts_of_strategies(recipe) + _conflicts_of_schedule(recipe)
    return conflicts + _conflicts_of_evaluation(recipe) + _conflicts_of_method(recipe)


def _conflicts_of_batch(settings: OptimSettings) -> list[Conflict]:
    batch, micro_batch = settings.global_batch_size, settings.micro_batch_size
    if batch % micro_batch == 0:
        return []
    found = f"{batch} is not divisible by per_device_train_batch_size {micro_batch}"
    return [Conflict(("global_batch_size", "per_device_train_batch_size"), found, fix_of_batch(batch, micro_batch))]


def _conflicts_of_datasets(recipe: Recipe) -> list[Conflict]:
    """Conflicts within the lists of data sets, and of their weights with the order."""
    conflicts = []
    for flag, entries in (("dataset", recipe.dataset), ("eval_dataset", recipe.eval_dataset)):
        if isinstance(entries, list):
            conflicts += _conflicts_of_entries(flag, entries)
    if not recipe.shuffle and isinstance(recipe.dataset, list) and recipe.dataset[0].weight is not None:
        fix = "leave the weights out: the data sets then come one after another"
        conflicts.append(Conflict(("shuffle", "dataset"), "false, with weights, which draw at random", fix))
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
    if recipe.max_train_samples:
        fix = "give max_steps only: a run reads no more of a stream than its steps need"
        conflicts.append(Conflict(("streaming", "max_train_samples"), "with max_train_samples", fix))
    if recipe.dedup:
        fix = "remove repeated rows beforehand: only data that is read as a whole can be searched for them"
        conflicts.append(Conflict(("streaming", "dedup"), "with dedup", fix))
    if not recipe.shuffle:
        fix = "use shuffle_buffer_size 1: rows keep the order of their file, and only files come in random order"
        conflicts.append(Conflict(("streaming", "shuffle"), "with shuffle false", fix))
    for strategy, steps in (("eval_strategy", "eval_steps"), ("save_strategy", "save_steps")):
        if getattr(recipe, strategy) == "epoch":
            fix = f"a stream's epochs have no known end: set {steps}"
            conflicts.append(Conflict(("streaming", strategy), f"with {strategy} epoch", fix))
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


def _conflicts_of_attention(recipe: Recipe) -> list[Conflict]:
    """Conflicts of ``attn_implementation`` with ``packing``."""
    kernel, keys = recipe.attn_implementation, ("attn_implementation", "packing")
    if kernel == "varlen" and not recipe.packing:
        return [Conflict(keys, "varlen without packing", "use auto; --packing makes batches of other samples")]
    if kernel == "flash_attention_2" and recipe.packing:
        return [Conflict(keys, "flash_attention_2 with packing", "use auto: varlen needs no other package")]
    return []


def _conflicts_of_strategies(recipe: Recipe) -> list[Conflict]:
    """Conflicts of ``eval_strategy`` and ``save_strategy`` with the numbers of steps."""
    conflicts = []
    for strategy, steps in (("eval_strategy", "eval_steps"), ("save_strategy", "save_steps")):
        when = getattr(recipe, strategy)
        num_steps = getattr(recipe, steps)
        if when == "steps" and not num_steps:
            conflicts.append(Conflict((strategy, steps), f"steps without {steps}", f"set {steps}"))
        if when in ("no", "epoch") and num_steps:
            fix = f"set {steps} to 0, or leave {strategy} out"
            conflicts.append(Conflict((strategy, steps), f"{when}, with {steps} {num_steps}", fix))
    return conflicts


def _conflicts_of_schedule(settings: OptimSettings) -> list[Conflict]:
    """Conflicts of ``lr_scheduler_type`` with the settings that only some shapes have."""
    conflicts = []
    shape = settings.lr_scheduler_type
    if settings.min_lr_rate is None and shape == "cosine_with_min_lr":
        fix = "set min_lr_rate, such as 0.1: the rate then falls to a tenth of learning_rate"
        conflicts.append(Conflict(("lr_scheduler_type", "min_lr_rate"), f"{shape} without min_lr_rate", fix))
    if settings.lr_decay_steps is None and shape == "warmup_stable_decay":
        fix = "set lr_decay_steps, such as 0.1: the rate then falls in the last tenth of all steps"
        conflicts.append(Conflict(("lr_scheduler_type", "lr_decay_steps"), f"{shape} without lr_decay_steps", fix))
    for name, shapes in (
        ("min_lr_rate", ("cosine_with_min_lr", "warmup_stable_decay")),
        ("lr_decay_steps", ("warmup_stable_decay",)),
    ):
        if getattr(settings, name) is not None and shape not in shapes:
            fix = f"leave it out, or use lr_scheduler_type {' or '.join(shapes)}"
            conflicts.append(Conflict((name, "lr_scheduler_type"), f"given with lr_scheduler_type {shape}", fix))
    return conflicts


def _conflicts_of_evaluation(settings: EvalSettings) -> list[Conflict]:
    """Conflicts of the evaluation data, and of early stopping, with when to evaluate."""
    conflicts = []
    if settings.eval_dataset and settings.eval_split_size:
        found = "given together with eval_dataset"
        fix = "keep one of the two: a split is held out of training, an eval_dataset is not"
        conflicts.append(Conflict(("eval_split_size", "eval_dataset"), found, fix))
    wants_evaluation = "eval_steps eval_strategy eval_on_start predict_with_generate early_stopping_patience".split()
    needing_data = [name for name in wants_evaluation if getattr(settings, name) not in (0, None, "no")]
    if needing_data and not settings.has_evaluation:
        fix = "set eval_dataset, or eval_split_size, which is held out of training"
        keys = (needing_data[0], "eval_dataset", "eval_split_size")
        conflicts.append(Conflict(keys, "nothing to evaluate on", fix))
    if settings.early_stopping_patience and not settings.eval_steps and settings.eval_strategy != "epoch":
        found = "given without an evaluation before the end"
        fix = "set eval_steps, or eval_strategy epoch"
        conflicts.append(Conflict(("early_stopping_patience", "eval_steps", "eval_strategy"), found, fix))
    if settings.early_stopping_threshold and not settings.early_stopping_patience:
        found = "given without early_stopping_patience"
        fix = "set early_stopping_patience too"
        conflicts.append(Conflict(("early_stopping_threshold", "early_stopping_patience"), found, fix))
    return conflicts


def _conflicts_of_method(settings: MethodSettings) -> list[Conflict]:
    """Conflicts of what trains with the method, and with an adapter that exists."""
    conflicts = []
    if settings.adapter_name_or_path and settings.method == "full":
        fix = "use --method lora, or merge it first"
        conflicts.append(Conflict(("adapter_name_or_path", "method"), "given with method full", fix))
    if settings.freeze and settings.train_only:
        conflicts.append(Conflict(("train_only", "freeze"), "given together with freeze", "keep one of the two"))
    for name in ("freeze", "train_only"):
        if getattr(settings, name) and settings.method != "full":
            fix = "leave it out: adapters freeze the whole model; or use --method full"
            conflicts.append(Conflict((name, "method"), f"given with method {settings.method}", fix))
    for name in ("new_tokens", "trainable_tokens", "lora_modules_to_save"):
        if settings.adapter_name_or_path and getattr(settings, name):
            found = "given with adapter_name_or_path: what that adapter trains is kept"
            fix = "leave one out, or merge the adapter first"
            conflicts.append(Conflict((name, "adapter_name_or_path"), found, fix))
    if settings.use_dora and settings.method == "qlora":
        fix = "use --method lora, or drop use_dora"
        conflicts.append(Conflict(("use_dora", "method"), "given with method qlora", fix))
    return conflicts


def fix_of_batch(batch: int, micro_batch: int, num_processes: int = 1) -> str:
    """Return what to type where processes x micro-batches do not divide the global batch, without changing the maths.

    The advice is the largest micro-batch that divides the global batch; if ``num_processes`` does not divide it, also
    fewer processes. Another global batch comes last, because it changes what is learned.
    """
    fewer = next(n for n in range(num_processes, 0, -1) if batch % n == 0)
    smaller = next(n for n in range(micro_batch, 0, -1) if (batch // fewer) % n == 0)
    flags = []
    if fewer != num_processes:
        flags.append(f"--num_processes {fewer}")
    if smaller != micro_batch:
        flags.append(f"--per_device_train_batch_size {smaller}")
    text = f"{' '.join(flags)}: the same maths"
    if fewer == num_processes:
        return text
    below = batch // num_processes * num_processes  # 0 if there are more processes than samples
    others = [str(n) for n in (below, below + num_processes) if n]
    return f"{text}; or another global batch, {' or '.join(others)}, which changes what is learned"
