"""Find settings that are valid one by one but not together. Needs only the recipe, not the machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from kit.config.dataset_entry import DatasetEntry, flag_of_list, with_all_weights, with_own_names
from kit.config.recipe import Recipe
from kit.config.settings.evaluation import MetricName
from kit.config.settings.objective import DECLARED, ObjectiveSettings
from kit.config.settings.optimisation import OptimSettings
from kit.errors import Problem, did_you_mean
from kit.own_metric import is_own, key_of

_OF_LOSS = ("eval_loss", "eval_perplexity", "eval_tokens")
_MARGINS = "eval_rewards/margins"


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
    conflicts += _conflicts_of_attention(recipe) + _conflicts_of_objective(recipe) + _conflicts_of_optimiser(recipe)
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
        fix = f"--shuffle true; or {flag_of_list('dataset', _weighted(recipe.dataset, None))}, one after another"
        conflicts.append(Conflict(("shuffle", "dataset"), "false, with weights, which draw at random", fix))
    return conflicts


def _conflicts_of_entries(flag: str, entries: list[DatasetEntry]) -> list[Conflict]:
    conflicts = []
    names = [entry.filled(None, "", {}).name for entry in entries]
    for name in sorted({name for name in names if names.count(name) > 1}):
        fix = flag_of_list(flag, with_own_names(entries))
        conflicts.append(Conflict((flag,), f"two data sets of the name {name!r}", fix))
    weights = [entry.weight for entry in entries]
    without_weights = flag_of_list(flag, _weighted(entries, None))
    if flag == "eval_dataset" and any(weight is not None for weight in weights):
        conflicts.append(Conflict((flag,), "weights, but each evaluation sample counts once", without_weights))
    elif any(weight is None for weight in weights) and any(weight is not None for weight in weights):
        without = ", ".join(name for name, weight in zip(names, weights, strict=True) if weight is None)
        fix = f"{flag_of_list(flag, with_all_weights(entries))}; or {without_weights}, by their sizes"
        conflicts.append(Conflict((flag,), f"some weights are missing: {without}", fix))
    elif all(weight == 0 for weight in weights):
        conflicts.append(Conflict((flag,), "all weights are 0", flag_of_list(flag, _weighted(entries, 1))))
    return conflicts


def _weighted(entries: list[DatasetEntry], weight: float | None) -> list[DatasetEntry]:
    """The entries with another weight each."""
    return [entry.model_copy(update={"weight": weight}) for entry in entries]


def _conflicts_of_streaming(recipe: Recipe) -> list[Conflict]:
    conflicts = []
    if recipe.max_steps is None:
        fix = "--max_steps 1000, or another number: a stream has no known end"
        conflicts.append(Conflict(("streaming", "max_steps"), "without max_steps", fix))
    if recipe.max_train_samples:
        fix = "leave out --max_train_samples: a run reads no more of a stream than its steps need"
        conflicts.append(Conflict(("streaming", "max_train_samples"), "with max_train_samples", fix))
    if recipe.dedup:
        fix = "--dedup false, and remove repeated rows beforehand: only data that is read as a whole can be searched"
        conflicts.append(Conflict(("streaming", "dedup"), "with dedup", fix))
    if not recipe.shuffle:
        fix = (
            "--shuffle true --shuffle_buffer_size 1: rows keep the order of their file, and files come in random order"
        )
        conflicts.append(Conflict(("streaming", "shuffle"), "with shuffle false", fix))
    for strategy, steps in (("eval_strategy", "eval_steps"), ("save_strategy", "save_steps")):
        if getattr(recipe, strategy) == "epoch":
            fix = f"--{strategy} steps --{steps} 100: a stream's epochs have no known end"
            conflicts.append(Conflict(("streaming", strategy), f"with {strategy} epoch", fix))
    if recipe.eval_split_size:
        fix = "--eval_split_size 0 --eval_dataset FILE: nothing can be held out of a stream"
        conflicts.append(Conflict(("streaming", "eval_split_size"), "with eval_split_size", fix))
    if isinstance(recipe.dataset, list) and len(recipe.dataset) > 1 and recipe.dataset[0].weight is None:
        fix = f"{flag_of_list('dataset', _weighted(recipe.dataset, 1))}, or other weights: a stream's size is not known"
        conflicts.append(Conflict(("streaming", "dataset"), "several data sets without weights", fix))
    if isinstance(recipe.dataset, list) and any(entry.max_samples for entry in recipe.dataset):
        without = [entry.model_copy(update={"max_samples": None}) for entry in recipe.dataset]
        fix = f"{flag_of_list('dataset', without)}: a run reads no more of a stream than its steps need"
        conflicts.append(Conflict(("streaming", "dataset"), "max_samples of a data set, which are drawn of all", fix))
    if isinstance(recipe.dataset, list) and recipe.mixing == "tokens":
        fix = "--mixing samples: a stream's lengths are not known beforehand"
        conflicts.append(Conflict(("streaming", "mixing"), "with mixing tokens", fix))
    return conflicts


def _conflicts_of_objective(recipe: Recipe) -> list[Conflict]:
    """Conflicts of ``objective`` with the settings of other objectives, and with how the data are read."""
    objective, declared = recipe.objective, recipe.declared
    conflicts = []
    for name, info in ObjectiveSettings.model_fields.items():
        takers = [each for each, other in DECLARED.items() if name in other.settings]
        if takers and objective not in takers and getattr(recipe, name) != info.default:
            fix = f"leave it out, or put it under by_objective in a recipe; or --objective {' or '.join(takers)}"
            conflicts.append(Conflict((name, "objective"), f"objective {objective} does not read it", fix))
    if objective == "dpo" and recipe.label_smoothing and recipe.dpo_loss in ("ipo", "hinge"):
        fix = "--label_smoothing 0; or --dpo_loss sigmoid"
        conflicts.append(Conflict(("label_smoothing", "dpo_loss"), f"given with dpo_loss {recipe.dpo_loss}", fix))
    if objective == "dpo" and recipe.dpo_loss == "robust" and not recipe.label_smoothing:
        fix = "--label_smoothing 0.1, the share of pairs that are the wrong way round; or --dpo_loss sigmoid"
        conflicts.append(Conflict(("dpo_loss", "label_smoothing"), "robust without label_smoothing", fix))
    metric = recipe.metric_for_best_model
    has_metric = (
        not metric.startswith("eval_rewards/") or declared.rows == "pairs" or (objective, metric) == ("kto", _MARGINS)
    )
    if not has_metric:
        fix = "--metric_for_best_model eval_loss"
        found = f"{metric}, which objective {objective} does not have"
        conflicts.append(Conflict(("metric_for_best_model", "objective"), found, fix))
    begins_orthogonal = recipe.init_lora_weights == "orthogonal" and not recipe.adapter_name_or_path
    if begins_orthogonal and recipe.method != "full" and declared.has_reference:
        found = f"orthogonal, with objective {objective}: B A is 0 only up to rounding, and the reference is the base"
        conflicts.append(Conflict(("init_lora_weights", "objective"), found, "--init_lora_weights default"))
    if declared.rows == "answers":
        return conflicts
    if recipe.train_on == "all":
        found = f"all, with objective {objective}, which compares answers"
        conflicts.append(Conflict(("train_on", "objective"), found, "--train_on assistant"))
    if recipe.excess_length_strategy == "split":
        fix = "--excess_length_strategy truncate cuts the prompt; or --excess_length_strategy drop"
        found = f"split, with objective {objective}: half an answer is not the better one"
        conflicts.append(Conflict(("excess_length_strategy", "objective"), found, fix))
    if recipe.streaming and objective == "kto":
        found = "with objective kto, which also reads each prompt with the answer to another one"
        conflicts.append(Conflict(("streaming", "objective"), found, "--streaming false"))
    elif recipe.streaming and recipe.precomputes_reference:
        found = f"with objective {objective}, whose reference is computed before the first step"
        fix = "--streaming false"
        flags = "--method lora" if recipe.method == "full" else ""
        flags += " --precompute_reference false" if recipe.precompute_reference else ""
        if not recipe.adapter_name_or_path:
            fix += f"; or {flags.strip()}: the reference is then the model without its adapter"
        keys = ("streaming", "objective", "method", "precompute_reference", "adapter_name_or_path")
        conflicts.append(Conflict(keys, found, fix))
    return conflicts


def _conflicts_of_attention(recipe: Recipe) -> list[Conflict]:
    """Conflicts of ``attn_implementation`` with ``packing``."""
    kernel, keys = recipe.attn_implementation, ("attn_implementation", "packing")
    if kernel in ("varlen", "flash_attention_3") and not recipe.packing:
        fix = "--attn_implementation auto; or --packing true, which makes batches of other samples"
        return [Conflict(keys, f"{kernel} without packing", fix)]
    if kernel == "flash_attention_2" and recipe.packing:
        fix = "--attn_implementation auto: it takes varlen, which needs no other package"
        return [Conflict(keys, "flash_attention_2 with packing", fix)]
    return []


def _conflicts_of_strategies(recipe: Recipe) -> list[Conflict]:
    """Conflicts of ``eval_strategy`` and ``save_strategy`` with the numbers of steps."""
    conflicts = []
    for strategy, steps in (("eval_strategy", "eval_steps"), ("save_strategy", "save_steps")):
        when = getattr(recipe, strategy)
        num_steps = getattr(recipe, steps)
        if when == "steps" and not num_steps:
            conflicts.append(Conflict((strategy, steps), f"steps without {steps}", f"--{steps} 100, or another number"))
        if when in ("no", "epoch") and num_steps:
            fix = f"--{steps} 0; or --{strategy} steps"
            conflicts.append(Conflict((strategy, steps), f"{when}, with {steps} {num_steps:g}", fix))
    return conflicts


def _conflicts_of_schedule(settings: OptimSettings) -> list[Conflict]:
    """Conflicts of ``lr_scheduler_type`` with the settings that only some shapes have."""
    conflicts = []
    shape = settings.lr_scheduler_type
    if settings.min_lr_rate is None and shape == "cosine_with_min_lr":
        fix = "--min_lr_rate 0.1: the rate then falls to a tenth of learning_rate"
        conflicts.append(Conflict(("lr_scheduler_type", "min_lr_rate"), f"{shape} without min_lr_rate", fix))
    if settings.lr_decay_steps is None and shape == "warmup_stable_decay":
        fix = "--lr_decay_steps 0.1: the rate then falls in the last tenth of all steps"
        conflicts.append(Conflict(("lr_scheduler_type", "lr_decay_steps"), f"{shape} without lr_decay_steps", fix))
    for name, shapes in (
        ("min_lr_rate", ("cosine_with_min_lr", "warmup_stable_decay")),
        ("lr_decay_steps", ("warmup_stable_decay",)),
    ):
        if getattr(settings, name) is not None and shape not in shapes:
            fix = f"leave it out; or --lr_scheduler_type {shapes[0]}"
            conflicts.append(Conflict((name, "lr_scheduler_type"), f"given with lr_scheduler_type {shape}", fix))
    return conflicts


def _conflicts_of_evaluation(recipe: Recipe) -> list[Conflict]:
    """Conflicts of the evaluation data, and of what needs evaluations, with when to evaluate."""
    conflicts = []
    if recipe.eval_dataset and recipe.eval_split_size:
        found = "given together with eval_dataset"
        fix = (
            "--eval_split_size 0; or leave out --eval_dataset: a split is held out of training, an eval_dataset is not"
        )
        conflicts.append(Conflict(("eval_split_size", "eval_dataset"), found, fix))
    wants_evaluation = (
        "eval_steps eval_strategy eval_on_start predict_with_generate early_stopping_patience keep_best"
    ).split()
    needing_data = [name for name in wants_evaluation if getattr(recipe, name) not in (0, None, "no")]
    if needing_data and not recipe.has_evaluation:
        fix = "--eval_dataset FILE"
        if not recipe.streaming:  # of which nothing can be held out
            fix = f"--eval_split_size 0.1 holds a tenth of the data out of training; or {fix}"
        keys = (needing_data[0], "eval_dataset", "eval_split_size")
        conflicts.append(Conflict(keys, "nothing to evaluate on", fix))
    if recipe.early_stopping_patience and not recipe.eval_steps and recipe.eval_strategy != "epoch":
        found = "given without an evaluation before the end"
        fix = "--eval_strategy steps --eval_steps 100"
        if not recipe.streaming:  # whose epochs have no known end
            fix = f"--eval_strategy epoch; or {fix}"
        conflicts.append(Conflict(("early_stopping_patience", "eval_steps", "eval_strategy"), found, fix))
    if recipe.early_stopping_threshold and not recipe.early_stopping_patience:
        found = "given without early_stopping_patience"
        fix = "--early_stopping_patience 3, or another number of evaluations"
        conflicts.append(Conflict(("early_stopping_threshold", "early_stopping_patience"), found, fix))
    conflicts += _conflicts_of_answers(recipe)
    return conflicts


def _conflicts_of_answers(settings: Recipe) -> list[Conflict]:
    """Conflicts of the metrics of generated answers, and of how the answers are drawn."""
    conflicts = []
    keys = list(map(key_of, settings.metrics))
    for key in sorted({key for key in keys if keys.count(key) > 1 or f"eval_{key}" in _OF_LOSS}):
        if own := [name for name in settings.metrics if is_own(name) and key_of(name) == key]:
            path = own[0].rpartition(":")[0]
            found = f"{own[0]} would be eval_{key}, which another result is called"
            conflicts.append(Conflict(("metrics",), found, f"rename the function: {path}:my_{key}"))
    num = settings.num_return_sequences
    if settings.temperature is None:
        for name, is_given in (("top_p", settings.top_p is not None), ("num_return_sequences", num > 1)):
            if is_given:
                found = f"{getattr(settings, name):g} without temperature: answers are greedy"
                conflicts.append(Conflict((name, "temperature"), found, "--temperature 1"))
    metric = settings.metric_for_best_model
    name, _, best = metric.removeprefix("eval_").partition("/")
    if metric == "eval_loss" or metric.startswith("eval_rewards/"):
        return conflicts
    asks = settings.train_on != "all"  # else there is no prompt that is not learned
    computed = ["exact_match", *keys] if settings.predict_with_generate and asks else []
    bests = ["", f"{'pass' if name in ('exact_match', 'number') else 'best'}@{num}"][: 2 if num > 1 else 1]
    if name in computed and (best in bests and not (best and name == "bleu")):
        return conflicts
    known = get_args(MetricName)
    found = f"{metric}, which these evaluations do not compute"
    involved = "metric_for_best_model predict_with_generate metrics num_return_sequences temperature train_on".split()
    if not asks:
        found += ": with train_on all nothing is asked"
        fix = "--metric_for_best_model eval_loss"
    elif name in computed:
        fix = f"--metric_for_best_model eval_{name}"
    elif name in known:
        fix = f"--predict_with_generate true --metrics {','.join(dict.fromkeys([*settings.metrics, name]))}"
    elif hint := did_you_mean(metric, ["eval_loss", *(f"eval_{each}" for each in known)]):
        fix = hint
    else:
        fix = f"--predict_with_generate true --metrics FILE.py:{name}, the file with your function of that name"
    conflicts.append(Conflict(tuple(involved), found, fix))
    return conflicts


def _conflicts_of_method(settings: Recipe) -> list[Conflict]:
    """Conflicts of what trains with the method, and with an adapter that exists."""
    conflicts = []
    if settings.adapter_name_or_path and settings.method == "full":
        fix = "--method lora, which trains the adapter on"
        conflicts.append(Conflict(("adapter_name_or_path", "method"), "given with method full", fix))
    if settings.freeze and settings.train_only:
        fix = "leave out --freeze; or leave out --train_only"
        conflicts.append(Conflict(("train_only", "freeze"), "given together with freeze", fix))
    for name in ("freeze", "train_only"):
        if getattr(settings, name) and settings.method != "full":
            fix = "leave it out: adapters freeze the whole model; or --method full"
            conflicts.append(Conflict((name, "method"), f"given with method {settings.method}", fix))
    for name in ("new_tokens", "trainable_tokens", "lora_modules_to_save", "adapter_options"):
        if settings.adapter_name_or_path and getattr(settings, name):
            found = "given with adapter_name_or_path: what that adapter trains is kept"
            fix = "leave it out; or leave out --adapter_name_or_path, and start from the adapter merged into its base"
            conflicts.append(Conflict((name, "adapter_name_or_path"), found, fix))
    if settings.use_dora and settings.method == "qlora":
        fix = "--method lora; or --use_dora false"
        conflicts.append(Conflict(("use_dora", "method"), "given with method qlora", fix))
    if settings.adapter_type != "lora" and settings.method != "full":
        conflicts += _conflicts_of_adapter_type(settings)
    if settings.fp8 and settings.method == "qlora":
        fix = "--fp8 false; or --method lora"
        conflicts.append(Conflict(("fp8", "method"), "true, with a base of 4 bits, which is multiplied in bf16", fix))
    if settings.init_lora_weights == "orthogonal" and settings.lora_r % 2 and settings.method != "full":
        found = f"orthogonal with lora_r {settings.lora_r}, which is odd: half of the rank is orthogonal to the other"
        fix = f"--lora_r {settings.lora_r + 1}; or --init_lora_weights default"
        conflicts.append(Conflict(("init_lora_weights", "lora_r"), found, fix))
    if settings.qat and settings.method == "qlora":
        found = f"{settings.qat}, with a base that is quantised already, to NF4, which is not what qat rounds to"
        conflicts.append(Conflict(("qat", "method"), found, "leave out --qat; or --method lora"))
    if settings.qat and settings.fp8:
        found = f"{settings.qat}, with fp8, which would round what qat has rounded to other numbers"
        conflicts.append(Conflict(("qat", "fp8"), found, "leave out --qat; or --fp8 false"))
    if settings.qat and settings.torch_compile:
        found = f"{settings.qat}, with torch_compile, which is not shown to round as the quantised model will"
        conflicts.append(Conflict(("qat", "torch_compile"), found, "--torch_compile false"))
    return conflicts


def _conflicts_of_adapter_type(recipe: Recipe) -> list[Conflict]:
    """Conflicts of another kind of adapter than LoRA with what only LoRA has, or was shown with."""
    names = """
        use_dora use_rslora lora_dropout lora_modules_to_save trainable_tokens new_tokens init_lora_weights
        loraplus_lr_ratio fp8 qat torch_compile""".split()
    given = [name for name in names if getattr(recipe, name) != type(recipe).model_fields[name].default]
    conflicts = []
    for name in [*given, *(["optim"] if recipe.optim == "muon" else [])]:
        found = f"given with adapter_type {recipe.adapter_type}, which does not have it or was not shown with it"
        conflicts.append(Conflict((name, "adapter_type"), found, "leave it out; or --adapter_type lora"))
    return conflicts


def _conflicts_of_optimiser(recipe: Recipe) -> list[Conflict]:
    """Conflicts of the optimiser with the method and the rate."""
    if recipe.optim.startswith("lion") and recipe.learning_rate is None:
        found = (
            f"{recipe.optim} without a learning_rate: the defaults are for AdamW, and lion moves each weight further"
        )
        fix = f"--learning_rate {recipe.peak_learning_rate / 5:g}, or another rate 3 to 10 times below AdamW's"
        return [Conflict(("learning_rate", "optim"), found, fix)]
    if recipe.optim != "adamw_bf16" or recipe.method == "full":
        return []
    found = (
        f"adamw_bf16 with method {recipe.method}, whose adapters are small: bf16 would cost accuracy and save nothing"
    )
    return [Conflict(("optim", "method"), found, "--optim adamw_torch_fused; or --method full")]


# What has no effect unless another setting is there: its name, that setting, and how to say it.
_NEEDS = {
    "max_eval_samples": ("has_evaluation", "eval_dataset or eval_split_size"),
    "per_device_eval_batch_size": ("has_evaluation", "eval_dataset or eval_split_size"),
    "eval_dataset_split": ("eval_dataset", "eval_dataset"),
    "eval_dataset_config": ("eval_dataset", "eval_dataset"),
    "eval_dataset_revision": ("eval_dataset", "eval_dataset"),
    "max_new_tokens": ("predict_with_generate", "predict_with_generate"),
    "metrics": ("predict_with_generate", "predict_with_generate"),
    "temperature": ("predict_with_generate", "predict_with_generate"),
    "top_p": ("predict_with_generate", "predict_with_generate"),
    "num_return_sequences": ("predict_with_generate", "predict_with_generate"),
    "qat_group_size": ("qat", "qat"),
    "activation_offload": ("gradient_checkpointing", "gradient_checkpointing"),
    "shuffle_buffer_size": ("streaming", "streaming"),
    "metric_for_best_model": ("picks_best", "keep_best or early_stopping_patience"),
    "run_name": ("report_to", "report_to"),
    "project": ("report_to", "report_to"),
}
_OF_ADAPTERS = """
adapter_type lora_r lora_alpha lora_dropout lora_target_modules lora_modules_to_save init_lora_weights use_rslora
use_dora loraplus_lr_ratio adapter_options
""".split()


def describe_unused(recipe: Recipe, trains: bool = True) -> list[str]:
    """Return a line that names the settings which were given and have no effect; none if all have one.

    They are not refused: a recipe may hold them for another method, or for another data set.
    """
    needs = dict(_NEEDS)
    if trains and recipe.method == "full":
        needs |= dict.fromkeys(_OF_ADAPTERS, ("", "method lora or qlora"))
    elif (
        trains
        and recipe.lora_target_modules == "all-linear"
        and not any(
            (recipe.lora_modules_to_save, recipe.trainable_tokens, recipe.new_tokens, recipe.adapter_name_or_path)
        )
    ):
        needs["embedding_learning_rate"] = ("", "lora_modules_to_save, trainable_tokens or new_tokens")
    if trains and recipe.method != "full" and recipe.adapter_type != "lora":
        needs |= dict.fromkeys(("lora_r", "lora_alpha"), ("", "adapter_type lora"))
    if recipe.precomputes_reference:  # in batches of that size
        del needs["per_device_eval_batch_size"]
    defaults = type(recipe).model_fields
    unused: dict[str, list[str]] = {}
    for name, (needed, shown) in needs.items():
        is_given = name in recipe.model_fields_set and getattr(recipe, name) != defaults[name].default
        if is_given and not (needed and getattr(recipe, needed)):
            unused.setdefault(shown, []).append(name)
    return [f"note: no effect without {shown}: {', '.join(names)}" for shown, names in unused.items()]


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
    unit = num_processes * micro_batch
    below = batch // unit * unit  # 0 if the processes take more samples at once
    others = [f"--global_batch_size {n}" for n in (below, below + unit) if n]
    return f"{text}; or {' or '.join(others)}, which changes what is learned"
