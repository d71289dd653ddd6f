"""PEFT adapters: attach new or saved ones to a model, and check from shapes alone whether they fit.

LoRA has its own flags. Other types of ``ADAPTER_TYPES`` are made by peft's own config class from
``adapter_options``. What is refused is found by letting peft attach it to the model on meta.
"""

import copy
import shlex
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kit.config.adapter_types import ADAPTER_TYPES
from kit.config.expressions import matches, matches_any
from kit.config.settings.method import MethodSettings
from kit.model.adapters.freeze import adapted_weights, freeze, parts_of, trained_encoders
from kit.model.adapters.targets import (
    all_linear_targets,
    full_names,
    last_part,
    lost_on_reload,
    split_targets,
    tied_tables,
)
from kit.model.adapters.token_rows import check_rows_and_modules, num_rows, rows_and_modules_options
from kit.model.experts.packed import shown_as_parameters
from kit.model.pretrained.heads import SCORE, TASKS, head_of
from kit.model.pretrained.locate import ADAPTER_FILES, commit_of, open_adapter
from kit.system.errors import Problem, Problems, UserError, did_you_mean, first_line, listed

_FIELD = "adapter_name_or_path"
# Merged, an adapter on one of the two would change the other as well.
_TIED = "the embedding or the output head, which are tied in this model: an adapter on them cannot be merged"
_CHANGING_BASES = ("pissa", "olora", "corda", "lora_ga", "loftq", "mica")  # init_lora_weights of a saved adapter
# Types that add to a weight as it is stored: on 4 bits they would mistake the packed weights for plain ones.
_ON_PLAIN_WEIGHTS = {"hra", "loha", "lokr"}
# What the kit sets itself in the config of an adapter, or has a flag for.
_NO_OPTIONS = {
    *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "target_modules", "modules_to_save", "trainable_token_indices", "target_parameters"),
    *("r", "lora_alpha", "lora_dropout", "init_lora_weights", "use_rslora", "use_dora", "ensure_weight_tying"),
    "save_projection",  # of vera: what does not train is not saved, but made again
}


def attach_adapter(model: Any, settings: MethodSettings, seed: int = 0) -> torch.nn.Module:
    """Freeze the base, and add new adapters or load those of ``adapter_name_or_path``.

    With method ``full`` only the parts are frozen that ``settings`` names; adapters train in the other parts alone.

    Args:
        seed: of the initial values of new adapters. A model on meta has no values.
    """
    if settings.method == "full":
        freeze(model, settings)
        return model
    from peft import get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    from kit.model.experts.forward import install_expert_lora
    from kit.model.layers.lora_linear import install_lora_linear

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    # Where every rank reads the weights, all must make the same matrices: sharding keeps a part of each one's copy.
    torch.manual_seed(seed)
    adapted: Any
    with shown_as_parameters(model):
        if settings.adapter_name_or_path:
            left = adapted_weights(model, settings)
            adapted = _load_adapter(model, settings.adapter_name_or_path)
            for module, is_chosen in _adapting_modules(adapted, left):
                if not is_chosen:
                    module.requires_grad_(False)
        else:
            adapted = get_peft_model(model, _new_config(model, settings))
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # peft leaves rows and whole modules in the dtype of the base
            parameter.data = parameter.data.float()
    _keep_dtype_of_states(adapted.get_base_model())
    config = adapted.peft_config["default"]
    if config.modules_to_save or getattr(config, "trainable_token_indices", None):
        from kit.model.layers.row_layers import install_row_layers, keep_ties

        install_row_layers(adapted.get_base_model())
        keep_ties(adapted.get_base_model())
    for module in adapted.modules():
        if isinstance(module, BaseTunerLayer):
            # Else peft copies each input to float32, and autocast copies it back to bfloat16 for the product. Without
            # autocast, weights and inputs have one dtype anyway.
            module.cast_input_dtype_enabled = False  # type: ignore[attr-defined]
    if settings.adapter_type == "lora":
        install_expert_lora(adapted, settings.lora_dropout)  # of a saved one the config cannot hold it
        install_lora_linear(adapted)
    return adapted


def _keep_dtype_of_states(base: Any) -> None:
    """Let a fully fine-tuned embedding, in float32, give the layers vectors in the dtype of the frozen weights.

    Else all hidden states are float32, which costs memory, and which a layer norm in bf16 does not take on a CPU.
    """
    from peft.utils.other import ModulesToSaveWrapper

    table = base.get_input_embeddings()
    if isinstance(table, ModulesToSaveWrapper):
        table.register_forward_hook(lambda table, _, vectors: vectors.to(table.original_module.weight.dtype))


def _load_adapter(model: Any, name: str) -> Any:
    from peft import PeftModel

    with warnings.catch_warnings():
        # The warning is expected for a model on meta: in a dry run, and if rank 0 sends the weights.
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
        return PeftModel.from_pretrained(model, str(open_adapter(name)), is_trainable=True)


def _adapting_modules(adapted: Any, left: Collection[int]) -> list[tuple[torch.nn.Module, bool]]:
    """peft's modules, each with whether a weight of the base in it is in ``left``, by its ``id``.

    The names of their own weights do not tell: a pattern may end with that of the weight that they adapt.
    """
    return [(each, any(id(p) in left for p in each.parameters())) for each in _modules_of_peft(adapted)]


def _modules_of_peft(adapted: Any) -> list[Any]:
    """The modules with adapters, token rows or whole modules that train."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return [each for each in adapted.modules() if isinstance(each, BaseTunerLayer | AuxiliaryTrainingWrapper)]


def _new_config(model: Any, settings: MethodSettings) -> Any:
    """peft's config of new adapters. Raises ``ValueError`` or ``TypeError`` as peft's class does."""
    modules, parameters = _targets(model, settings)
    options: dict[str, Any] = {}
    if settings.adapter_type == "lora":
        options = {
            "r": settings.lora_r,
            "lora_alpha": settings.lora_alpha,
            # On parameters peft refuses dropout, and would not open the adapter again: ``install_expert_lora`` adds it.
            "lora_dropout": 0.0 if parameters else settings.lora_dropout,
            "target_parameters": parameters or None,
            "init_lora_weights": True if settings.init_lora_weights == "default" else settings.init_lora_weights,
            "use_rslora": settings.use_rslora,
            "use_dora": settings.use_dora,
            **rows_and_modules_options(model, settings),
        }
    elif parameters:
        raise ValueError(f"{listed(parameters)}: only LoRA adapts fused experts")
    elif settings.adapter_type == "vera":
        options = {"save_projection": False}
    head = head_of(model.config)
    # A new head is fully fine-tuned.
    if head == "scores" and SCORE not in (whole := options.get("modules_to_save", [])):
        options["modules_to_save"] = [*whole, SCORE]
    return _config_class(settings.adapter_type)(
        task_type=TASKS[head],
        # The commit of a hub id; without it peft would open what the branch has become.
        revision=commit_of(settings.model_name_or_path, settings.model_revision),
        target_modules=modules,
        **options,
        **(settings.adapter_options or {}),
    )


def _targets(model: Any, settings: MethodSettings) -> tuple[list[str], list[str]]:
    """Names of the modules and of the parameters to adapt, in the parts that ``train_only`` and ``freeze`` leave.

    Without these, a name that the language model shares with an encoder, such as ``q_proj``, is that of the former.
    """
    targets = settings.lora_target_modules
    modules, parameters = split_targets(model, targets, trained_encoders(model, settings))
    weights = dict(model.named_parameters(remove_duplicate=False))
    modules = full_names(modules, [name for name, _ in model.named_modules()])
    parameters = full_names(parameters, [*weights])
    if settings.train_only or settings.freeze:
        left = adapted_weights(model, settings)
        names = [name for name, module in model.named_modules() if any(id(p) in left for p in module.parameters(False))]
        modules = [name for name in names if matches_any(name, modules)]
        parameters = [name for name, p in weights.items() if id(p) in left and matches_any(name, parameters)]
    elif targets != "all-linear" and (parts := parts_of(model)):
        found = [[name for name, _ in model.named_modules() if matches(name, target)] for target in modules]
        own = [[name for name in names if parts.get(f"{name}.weight") == "language"] for names in found]
        modules = list(dict.fromkeys(chain.from_iterable(a or b for a, b in zip(own, found, strict=True))))
    return modules, parameters


def _config_class(kind: str) -> Any:
    """peft's config class of a kind of adapter."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    return PEFT_TYPE_TO_CONFIG_MAPPING[kind.upper()]  # type: ignore[index]  # its keys are strings too


@contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """In the ``with`` block, let an adapted model compute as its base does.

    peft's own way to switch adapters off also changes which weights train, and sharded modules must not see that.
    """
    adapted = _modules_of_peft(model)
    assert adapted, "the weights of the model change, so it does not contain the reference model"
    for module in adapted:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module in adapted:
            module._disable_adapters = False


def check_adapter(settings: MethodSettings, meta_model: Any) -> list[Problem]:
    """Check whether the adapters of ``settings``, new or from files, fit the model. Does not change ``meta_model``."""
    if settings.adapter_name_or_path:
        problems = Problems()
        with problems.caught():
            _check_saved_adapter(settings, meta_model)
        return problems
    return _check_kind(settings) or _check_targets(settings, meta_model)


def _check_kind(settings: MethodSettings) -> list[Problem]:
    """Check that the adapter type is supported, and its options exist."""
    kind = settings.adapter_type
    if kind not in ADAPTER_TYPES:
        expected = f"one of {', '.join(ADAPTER_TYPES)}"
        return [Problem("adapter_type", repr(kind), expected, did_you_mean(kind, ADAPTER_TYPES))]
    if settings.method == "qlora" and kind in _ON_PLAIN_WEIGHTS:
        return [Problem("adapter_type", f"{kind}, which does not work on a 4-bit base", fix="--method lora")]
    known = {field.name for field in fields(_config_class(kind))}
    known -= _NO_OPTIONS if kind == "lora" else _NO_OPTIONS - {"r"}
    expected = f"fields of peft's {kind} config without a flag of their own: {', '.join(sorted(known))}"
    unknown = [name for name in settings.adapter_options or {} if name not in known]
    return [Problem("adapter_options", repr(name), expected, did_you_mean(name, known)) for name in unknown]


def _check_saved_adapter(settings: MethodSettings, meta_model: Any) -> None:
    """Raise ``UserError`` if the adapter is not there, or does not fit the model and the method."""
    from peft import PeftConfig

    folder = open_adapter(settings.adapter_name_or_path or "")
    try:
        config: Any = PeftConfig.from_pretrained(str(folder))
        base = config.base_model_name_or_path
        kind = config.peft_type.value.lower()
        use_dora = getattr(config, "use_dora", False)
        initialisation = str(getattr(config, "init_lora_weights", True)).lower()
        # Not needed for a check of shapes: some initial values need the base's weights, and the base may have moved.
        config.init_lora_weights = False
        config.base_model_name_or_path = None
    except Exception as error:  # the JSON may hold anything
        raise UserError(_FIELD, f"{folder / ADAPTER_FILES[0]} is not an adapter config: {first_line(error)}") from None
    if kind != settings.adapter_type or kind not in ADAPTER_TYPES:
        fix = f"--adapter_type {kind}" if kind in ADAPTER_TYPES else ""
        raise UserError(_FIELD, f"{folder} holds a {kind.upper()} adapter", settings.adapter_type.upper(), fix)
    dropout = settings.lora_dropout  # on parameters it counts, because the config cannot hold it
    if dropout and not config.target_parameters and dropout != config.lora_dropout:
        raise UserError(
            "lora_dropout", f"{dropout:g}, and {folder} keeps its {config.lora_dropout:g}", fix="leave it out"
        )
    wanted = TASKS[head_of(meta_model.config)]
    # Without its task, peft would neither train nor save a new head.
    if config.task_type != wanted and (config.task_type or wanted == TASKS["scores"]):
        found = f"{folder} holds an adapter for {config.task_type or 'no task'}, and this model is for {wanted}"
        fix = "merge it with `kit export` (one with a head: its run), then use --model_name_or_path with that"
        raise UserError(_FIELD, found, fix=fix)
    indices = getattr(config, "trainable_token_indices", None) or []  # ids, or ids for each module
    lists = indices.values() if isinstance(indices, dict) else [indices]
    last_id = max((max(ids) for ids in lists if ids), default=-1)
    if last_id >= num_rows(meta_model):
        found = (
            f"{folder} trained token id {last_id}, out of range for this model's vocabulary of {num_rows(meta_model)}"
        )
        raise UserError(_FIELD, found, "an adapter with its tokenizer", _base_flag(base))
    if use_dora and settings.method == "qlora":
        found = f"{folder} was made with use_dora, given with method qlora"
        raise UserError(_FIELD, found, fix="--method lora")
    if initialisation.startswith(_CHANGING_BASES):
        found = f"{folder} has init_lora_weights {initialisation}, by which peft changes the base whenever it is opened"
        fix = "peft's save_pretrained(..., path_initial_model_for_weight_conversion=...) makes an ordinary LoRA of it"
        raise UserError(_FIELD, found, fix=fix)
    _check_shapes(settings, folder, config, "" if base == settings.model_name_or_path else base, meta_model)


def _base_flag(base: str | None) -> str:
    """The flag for the base model that an adapter names."""
    return f"its base: --model_name_or_path {shlex.quote(base)}" if base else ""


def _check_shapes(settings: MethodSettings, folder: Path, config: Any, base: str | None, meta_model: Any) -> None:
    """Compare the tensors in the file of an adapter with those that the model with it would have, and see what trains.

    Args:
        config: of the adapter.
        base: the model that the adapter names, for the message; empty if it is this model.
    """
    from peft import get_peft_model, get_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

    try:
        with torch.device("meta"):  # the file may name any rank
            plain = copy.deepcopy(meta_model)
            left = adapted_weights(plain, settings)
            adapted = get_peft_model(plain, config)
        with safe_open(folder / ADAPTER_FILES[1], "pt") as file:
            stored = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (ValueError, RuntimeError, OSError, SafetensorError, TypeError, KeyError) as error:
        raise UserError(_FIELD, f"{folder}: {first_line(error)}", fix=_base_flag(base)) from None
    base_model = adapted.get_base_model()
    tables = base_model.get_input_embeddings(), base_model.get_output_embeddings()
    if tied_tables(meta_model) and any(isinstance(table, BaseTunerLayer) for table in tables):
        raise UserError(_FIELD, f"{folder} adapts {_TIED}", "an adapter of other modules")
    state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    expected = {name: list(tensor.shape) for name, tensor in state.items()}
    # peft may have saved an embedding that did not train.
    of_base = {f"base_model.model.{name}" for name, _ in meta_model.named_parameters(remove_duplicate=False)}
    names = {*expected, *(name for name in stored if name.replace(".base_layer", "") not in of_base)}
    differing = sorted(name for name in names if expected.get(name) != stored.get(name))
    if differing:
        name = differing[0]
        found = f"{folder} does not fit this model in {len(differing)} tensors: {name} is {stored.get(name, 'absent')}"
        raise UserError(_FIELD, found, str(expected.get(name, "absent")), _base_flag(base))
    if not any(is_chosen for _, is_chosen in _adapting_modules(adapted, left)):
        where = "train_only" if settings.train_only else "freeze"
        raise UserError(where, f"nothing of {folder} is left to train", "a part with its adapters")


def _check_targets(settings: MethodSettings, meta_model: Any) -> list[Problem]:
    field = "lora_target_modules"
    problems = []
    modules = dict(meta_model.named_modules())
    tied = tied_tables(meta_model)
    if settings.lora_target_modules != "all-linear":
        linear = {last_part(name) for name in all_linear_targets(meta_model)}
        expected = f"all-linear, some of {', '.join(sorted(linear))}, or a regular expression"
        lost = lost_on_reload(meta_model)
        for target in split_targets(meta_model, list(settings.lora_target_modules))[0]:
            named = {name: module for name, module in modules.items() if matches(name, target)}
            lost_here = [name for name in lost if name in named]
            if not named:
                problems.append(Problem(field, f"no module {target!r}", expected, did_you_mean(target, linear)))
            elif any(module is table for module in named.values() for table in tied):
                problems.append(Problem(field, f"{target!r} is {_TIED}", "modules that can be merged", "leave it out"))
            elif lost_here:
                found = f"{target!r} is also {lost_here[0]}, whose saved adapter peft could not load"
                problems.append(Problem(field, found, "names that leave it out, or all-linear"))
    if not problems and not any(_targets(meta_model, settings)):
        where = "train_only" if settings.train_only else "freeze"
        fix = "--method full trains it as it is"
        return [Problem(where, f"no module of {field} is left to adapt", "a part with linear modules", fix)]
    problems += check_rows_and_modules(settings, meta_model)
    if not problems and (reason := _refusal(settings, meta_model)):
        where = "adapter_options" if settings.adapter_options else field
        found = (
            f"peft's {settings.adapter_type} cannot adapt {type(meta_model).__name__} with these settings ({reason})"
        )
        problems.append(Problem(where, found, "linear modules, and options that fit them"))
    return problems


def _refusal(settings: MethodSettings, meta_model: Any) -> str:
    """Why peft cannot attach the adapters of ``settings`` as they are; empty if it can."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.filterwarnings("error", message="Invalid ")  # peft would take another value
            attach_adapter(copy.deepcopy(meta_model).float(), settings)
    except (ValueError, RuntimeError, TypeError, AttributeError, KeyError, ImportError, UserWarning) as error:
        return first_line(error)
    return ""
