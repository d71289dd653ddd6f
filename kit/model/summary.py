"""Check whether a method fits a model, and describe what is quantised, adapted and trained.

Promises: a method does what its name says, or says what it could not do. All answers come from modules and shapes, so
they are the same for a model on meta and for one with weights.
"""

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from kit.config.expressions import matches
from kit.config.settings.method import MethodSettings
from kit.model.adapters.qat import check_qat, describe_qat
from kit.model.adapters.reach import unreached_parts
from kit.model.adapters.targets import is_fused_expert, lost_on_reload, modules_taken_for_experts
from kit.model.experts.packed import PackedExperts, shown_as_parameters
from kit.model.four_bit import quantised_on_meta
from kit.model.layers.fp8_linear import check_fp8, describe_fp8
from kit.system.errors import Problem

_OF_WHOLE_MODULE = re.compile(r"\.(original_module|modules_to_save)\.")  # of peft: it trains as it is
_LARGE_SHARE = 0.3  # of the parameters: embeddings and head of a 1B Llama are 21 %, those of most others less


def aux_loss_coef(model: Any, router_aux_loss_coef: float | None) -> float:
    """Return the weight of the load-balancing (auxiliary) loss.

    Args:
        router_aux_loss_coef: of the recipe; None: the model's own if its config asks for the loss, else 0.
    """
    if router_aux_loss_coef is not None:
        return router_aux_loss_coef
    text = model.config.get_text_config()
    if not has_router_loss(model) or not getattr(text, "output_router_logits", False):
        return 0.0
    names = ("router_aux_loss_coef", "aux_loss_coef")
    own = next((value for name in names if (value := getattr(model, name, None))), None)
    # A model of text and images reads it in the config of its text.
    return float(own or (text is not model.config and getattr(text, "router_aux_loss_coef", None)) or 0.0)


def has_router_loss(model: Any) -> bool:
    """Return whether the model's own forward can compute a load-balancing (auxiliary) loss."""
    return "output_router_logits" in inspect.signature(type(model).forward).parameters


def check_parts(
    settings: MethodSettings, meta_model: Any, router_aux_loss_coef: float | None = None
) -> Iterator[Problem]:
    """Check that the model has what the method and the auxiliary loss need, before any weight is read."""

    name = type(meta_model).__name__
    if router_aux_loss_coef is not None and not has_router_loss(meta_model):
        found = f"{router_aux_loss_coef:g}, but {name} has no load-balancing (auxiliary) loss"
        yield Problem("router_aux_loss_coef", found, fix="leave it out")
    rescale_every = getattr(meta_model.config, "rescale_every", 0)
    if rescale_every:
        found = f"rescale_every {rescale_every}: {name} divides its weights whenever it evaluates"
        fix = 'write "rescale_every": 0 into its config.json; only float16 needs it'
        yield Problem("model_name_or_path", found, "weights that only training changes", fix)
    if settings.fp8:
        yield from check_fp8(meta_model)
    if settings.qat:
        yield from check_qat(settings, meta_model)
    if settings.method != "qlora":
        return
    quantised = quantised_on_meta(meta_model)
    in_4_bit = [f"{name}." for name, module in quantised.named_modules() if _is_in_4_bit(module)]
    for target in settings.lora_modules_to_save or []:
        holders = tuple(f"{full}." for full, _ in meta_model.named_modules() if matches(full, target))
        if any(each.startswith(holders) for each in in_4_bit):
            found = f"{target!r}, whose weights are in 4 bits with method qlora, and do not train"
            yield Problem("lora_modules_to_save", found, fix="--method lora; or name it in --lora_target_modules")
    if not in_4_bit:
        found = f"qlora would quantise none of the weights of {name}"
        linear = {type(module).__name__ for module in meta_model.modules() if isinstance(module, torch.nn.Linear)}
        unknown = sorted(linear - {"Linear"})
        if unknown:
            found += f": its linear layers are {', '.join(unknown)}, which bitsandbytes does not support"
        yield Problem("method", found, fix="--method lora")


def describe_parts(model: Any, settings: MethodSettings, router_aux_loss_coef: float | None = None) -> list[str]:
    """Describe in one line what is quantised, adapted and trained; further lines name what is left out.

    Args:
        model: with adapters, as ``build_model`` returns it before it is wrapped, or on meta for a dry run.
        router_aux_loss_coef: of the recipe; None: not set.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    count = _count(model)
    num_base = count.total() - count["trained"] - count["adapters"]
    lines = ["; ".join(_counts(model, count, num_base, settings.method))]
    lines += [base.new_head] if hasattr(base, "new_head") else []
    if settings.fp8:
        lines.append(describe_fp8(base))
    if settings.qat:
        lines.append(describe_qat(settings))
    unquantised = 1 - count["4-bit"] / num_base
    if settings.method == "qlora" and unquantised > _LARGE_SHARE:
        share = count["fused experts"] / num_base
        which = f" ({share:.0%} are fused experts that the family computes itself)" if share else ""
        lines.append(f"warning: qlora leaves {unquantised:.0%} of the parameters unquantised{which}")
    if settings.method != "full" and settings.lora_target_modules == "all-linear" and not settings.adapter_name_or_path:
        lines += _left_out_by_all_linear(base, num_base)
    trained = [name for name, parameter in base.named_parameters() if parameter.requires_grad]
    unreached = [
        name for name in unreached_parts(base) if not any(f"{each}.".startswith(f"{name}.") for each in trained)
    ]
    if unreached:
        not_adapted = ", not adapted" if _adapted_layers(model) else ""
        is_multimodal = base.config.get_text_config() is not base.config
        why = "train_only does not name" if is_multimodal else "no gradient from text reaches"
        lines.append(f"note: {why} {_first_three(unreached)}: frozen{not_adapted}")
    coefficient = aux_loss_coef(base, router_aux_loss_coef)
    if coefficient:
        lines.append(f"note: the training loss includes {coefficient:g} x the load-balancing (auxiliary) loss")
    if settings.attn_implementation == "auto" and base.config._attn_implementation == "eager":
        lines.append(f"note: eager attention, because {type(base).__name__} does not support sdpa")
    return lines


def _count(model: Any) -> "Counter[str]":
    """The number of values in a model's parameters by kind; of 4-bit weights, the values they stand for.

    The kinds are "4-bit", "adapters", "fused experts" and "other"; "trained" counts once more those that train.
    """
    count: Counter[str] = Counter()
    seen: set[int] = set()  # tied ones come once
    of_adapter = getattr(getattr(model, "base_model", None), "prefix", None)  # as peft names its tensors: lora_
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            kind, number = "other", parameter.numel()
            if isinstance(module, PackedExperts):
                kind, number = "4-bit", module.shape.numel()
            elif _is_in_4_bit(module) and name == "weight":
                kind, number = "4-bit", module.in_features * module.out_features
            elif of_adapter and of_adapter in prefix:
                kind = "adapters"
            elif is_fused_expert(prefix, parameter):
                kind = "fused experts"
            count[kind] += number
            count["trained"] += number if parameter.requires_grad else 0
    return count


def _is_in_4_bit(module: Any) -> bool:
    return isinstance(module, PackedExperts) or type(module).__name__ == "Linear4bit"


def _counts(model: Any, count: "Counter[str]", num_base: int, method: str) -> list[str]:
    """The numbers of parameters: all, adapted and trained."""
    counts = [f"weights: {num_base:,} parameters"]
    if method == "qlora":
        counts.append(f"{count['4-bit'] / num_base:.1%} in 4 bit")
    if adapted := _adapted_layers(model):
        counts.append("adapters on " + ", ".join(f"{number} {kind}" for kind, number in adapted.most_common()))
    share = count["trained"] / (num_base + count["adapters"])
    return [*counts, f"trained: {share:.2%}, {count['trained']:,}"]


def _adapted_layers(model: Any) -> Counter[str]:
    """The number of adapted layers by class."""
    kind = getattr(getattr(model, "base_model", None), "tuner_layer_cls", ())  # of peft
    return Counter(type(each.get_base_layer()).__name__ for each in model.modules() if isinstance(each, kind))


def _left_out_by_all_linear(base: Any, num_base: int) -> list[str]:
    lines = []
    with shown_as_parameters(base):
        fused = [
            (name, each)
            for name, each in base.named_parameters()
            if is_fused_expert(name, each) and not _OF_WHOLE_MODULE.search(name)
        ]
    if fused:
        number = sum(parameter.numel() for _, parameter in fused)
        names = dict.fromkeys(".".join(name.split(".")[-2:]) for name, _ in fused)
        found = f"note: all-linear leaves out fused experts ({number / num_base:.0%} of the parameters)"
        lines.append(f"{found}; to adapt them too: --lora_target_modules all-linear,{','.join(names)}")
    taken = modules_taken_for_experts(base)
    if taken:
        lines.append(f"note: peft would mistake {_first_three(taken)} for fused experts: not adapted")
    lost = lost_on_reload(base)
    if lost:
        lines.append(f"note: peft could not load adapters of {_first_three(lost)} again: not adapted")
    return lines


def _first_three(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
