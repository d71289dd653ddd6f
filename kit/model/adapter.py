"""Adapters: attach new or saved ones to a model, and check from shapes alone whether they fit."""

import copy
import warnings
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kit.config.settings.method import MethodSettings
from kit.errors import Problem, UserError, did_you_mean
from kit.model.freeze import freeze
from kit.model.locate import ADAPTER_FILES, commit_of, first_line, open_adapter
from kit.model.parts import adaptable, misnamed, split_targets
from kit.model.token_rows import beside_adapters, check_beside, num_rows


def attach_adapter(model: Any, settings: MethodSettings, seed: int = 0) -> torch.nn.Module:
    """Freeze the base, and add new adapters or load those of ``adapter_name_or_path``.

    With method ``full`` only the parts are frozen that ``settings`` names.

    Args:
        seed: of the initial values of new adapters. A model on meta has no values.
    """
    if settings.method == "full":
        freeze(model, settings)
        return model
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = _adapted(model, settings, seed)
    for module in adapted.modules():
        if isinstance(module, BaseTunerLayer):
            # Else peft copies each input to float32, and autocast copies it back to bfloat16 for the product. Without
            # autocast, weights and inputs have one dtype anyway.
            module.cast_input_dtype_enabled = False  # type: ignore[assignment]
    return adapted


def _adapted(model: Any, settings: MethodSettings, seed: int) -> torch.nn.Module:
    from peft import LoraConfig, PeftModel, get_peft_model

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    # Every rank must create the same matrices, because sharding keeps a part of each rank's own copy.
    torch.manual_seed(seed)
    if settings.adapter_name_or_path:
        with warnings.catch_warnings():
            # The warning is expected for a model on meta: in a dry run, and if rank 0 sends the weights.
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            folder = open_adapter(settings.adapter_name_or_path)
            return _settled(PeftModel.from_pretrained(model, str(folder), is_trainable=True))
    targets = settings.lora_target_modules
    modules, fused = (adaptable(model), None) if targets == "all-linear" else split_targets(model, list(targets))
    adapted = get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM",
            # The commit of a hub id; without it peft would open what the branch has become.
            revision=commit_of(settings.model_name_or_path, settings.model_revision),
            r=settings.lora_r,
            lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]
            lora_dropout=settings.lora_dropout,
            target_modules=modules,
            target_parameters=fused or None,
            use_rslora=settings.use_rslora,
            use_dora=settings.use_dora,
            **beside_adapters(model, settings),
        ),
    )
    return _settled(adapted)


def _settled(adapted: Any) -> torch.nn.Module:
    """Convert the trainable weights to float32, since peft leaves rows and whole modules in the dtype of the base."""
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    config = adapted.peft_config["default"]
    if config.modules_to_save or config.trainable_token_indices:
        from kit.model.row_layers import improve

        improve(adapted.get_base_model())
    return adapted


def check_adapter(settings: MethodSettings, meta_model: Any) -> list[Problem]:
    """Check whether the adapters of ``settings``, new or from files, fit the model. Does not change ``meta_model``."""
    if not settings.adapter_name_or_path:
        return _check_targets(settings, meta_model) + check_beside(settings, meta_model)
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict

    try:
        folder = open_adapter(settings.adapter_name_or_path)
    except UserError as error:
        return error.problems
    try:
        config: Any = PeftConfig.from_pretrained(str(folder))
        base, kind, use_dora = (
            config.base_model_name_or_path,
            config.peft_type.value,
            getattr(config, "use_dora", False),
        )
        # Not needed for a check of shapes: some initial values need the base's weights, and the base may have moved.
        config.init_lora_weights, config.base_model_name_or_path = False, None
    except Exception as error:  # the JSON may hold anything
        found = f"{folder / ADAPTER_FILES[0]} is no adapter's: {first_line(error)}"
        return [Problem("adapter_name_or_path", found)]
    if kind != "LORA":
        return [Problem("adapter_name_or_path", f"{folder} holds a {kind} adapter", "a LoRA")]
    rows = config.trainable_token_indices or []
    last = max((max(ids) for ids in (rows.values() if isinstance(rows, dict) else [rows]) if ids), default=-1)
    if last >= num_rows(meta_model):
        found = f"{folder} trained the token of id {last}, this model has {num_rows(meta_model)} rows"
        return [Problem("adapter_name_or_path", found, "its tokenizer beside it", f"its base is {base}")]
    if use_dora and settings.method == "qlora":
        found = f"{folder} was made with use_dora, given with method qlora"
        return [Problem("adapter_name_or_path", found, fix="use --method lora")]
    try:
        adapted = get_peft_model(copy.deepcopy(meta_model), config)
        with safe_open(folder / ADAPTER_FILES[1], "pt") as file:
            stored = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (ValueError, RuntimeError, OSError, SafetensorError, TypeError, KeyError) as error:
        return [Problem("adapter_name_or_path", f"{folder}: {first_line(error)}", fix=f"its base is {base}")]
    state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    wanted = {name: list(tensor.shape) for name, tensor in state.items()}
    stored = {name: shape for name, shape in stored.items() if "lora_" in name or name in wanted}
    differing = sorted(name for name in {**wanted, **stored} if wanted.get(name) != stored.get(name))
    if not differing:
        return []
    has, needs = (shapes.get(differing[0], "absent") for shapes in (stored, wanted))
    found = f"{folder} does not fit this model in {len(differing)} tensors: {differing[0]} is {has}"
    return [Problem("adapter_name_or_path", found, str(needs), f"its base is {base}")]


def _check_targets(settings: MethodSettings, meta_model: Any) -> list[Problem]:
    problems = []
    modules = dict(meta_model.named_modules())
    linear = {name.rsplit(".", 1)[-1] for name, module in modules.items() if isinstance(module, torch.nn.Linear)}
    expected = f"all-linear, or some of {', '.join(sorted(linear))}"
    targets: list[str] = [] if settings.lora_target_modules == "all-linear" else list(settings.lora_target_modules)
    lost = misnamed(meta_model)
    for target in split_targets(meta_model, targets)[0]:
        targeted = [module for name, module in modules.items() if name == target or name.endswith(f".{target}")]
        if not targeted:
            problems.append(
                Problem("lora_target_modules", f"no module {target!r}", expected, did_you_mean(target, linear))
            )
        elif not all(isinstance(module, torch.nn.Linear) for module in targeted) and _refusal(
            settings.model_copy(update={"lora_target_modules": [target]}), meta_model
        ):
            found = f"{target!r} is a {type(targeted[0]).__name__}, which takes no adapter"
            problems.append(Problem("lora_target_modules", found, expected))
        elif away := [name for name in lost if name == target or name.endswith(f".{target}")]:
            found = f"{target!r} is also {away[0]}, whose saved adapter peft would not find again"
            problems.append(Problem("lora_target_modules", found, "names that leave it out, or all-linear"))
    if not problems and (reason := _refusal(settings, meta_model)):
        found = f"peft cannot adapt {type(meta_model).__name__} so ({reason})"
        problems.append(Problem("lora_target_modules", found, expected))
    return problems


def _refusal(settings: MethodSettings, meta_model: Any) -> str:
    """Why peft cannot attach the adapters of ``settings``; empty if it can."""
    try:
        attach_adapter(copy.deepcopy(meta_model), settings)
    except (ValueError, RuntimeError, TypeError, AttributeError, KeyError, NotImplementedError) as error:
        return first_line(error)
    return ""
