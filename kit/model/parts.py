"""The parts of a model: what an adapter may change, and a count of what a method made of it.

Promises: a method does what its name says, or says what it could not do. All answers come from modules and shapes, so
they are the same for a model on meta and for one with weights.
"""

import copy
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from transformers import BitsAndBytesConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import AutoHfQuantizer
from transformers.quantizers.base import get_keys_to_not_convert

from kit.config.settings.method import MethodSettings
from kit.errors import Problem
from kit.model.reach import beyond_text, out_of_reach

# Names of modules that choose experts: an adapter on them would change which expert a token reaches.
_ROUTER = re.compile(r"(^|\.)(\w*router\w*|gate|\w*expert_gate)(\.|$)")
_EXPERTS = re.compile(r"(^|\.)\w*experts?(\.|$)")
# Linear modules whose weights the model reads itself, past the module's own forward: neither adapter nor 4 bits work.
_READ_DIRECTLY = re.compile(r"(^|\.)(mixer\.dt_proj|mamba\.dt_proj|altup\.(correction|prediction)_coefs)$")
# peft refuses these: the fast kernels of these families read the weights and would not see an adapter.
_MAMBA_FAMILIES, _MAMBA_MODULES = {"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"}, {"out_proj", "conv1d"}
_EARLIER_NAMES = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
_LARGE_SHARE = 0.3  # of the parameters: embeddings and head of a 1B Llama are 21 %, those of most others less


def four_bit_config(compute_dtype: torch.dtype, meta_model: Any) -> BitsAndBytesConfig:
    """Return the settings of ``qlora``: NF4, double quantisation, stored in the compute dtype.

    Output head, routers, and weights that the model reads past their module stay as they are.
    """
    names = (name for name, module in meta_model.named_modules() if isinstance(module, torch.nn.Linear))
    kept = [name for name in names if _ROUTER.search(name) or _READ_DIRECTLY.search(name)]
    return BitsAndBytesConfig(
        load_in_4bit=True,
        llm_int8_skip_modules=[*get_keys_to_not_convert(meta_model), *kept],
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_storage=compute_dtype,
    )


def quantised_on_meta(meta_model: Any, compute_dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a copy of a model on meta in which the modules that ``qlora`` would quantise are ``Linear4bit``."""
    quantised = copy.deepcopy(meta_model)
    quantizer = AutoHfQuantizer.from_config(four_bit_config(compute_dtype, meta_model), pre_quantized=False)
    quantizer.preprocess_model(model=quantised, device_map=None)
    quantizer.postprocess_model(quantised)
    return quantised


def adaptable(model: Any) -> list[str]:
    """Return the names of the modules that ``all-linear`` adapts.

    These are all linear modules, experts and shared experts among them, but for the output head, routers, what gets no
    gradient or is not called, and what peft refuses or would take for another module (``redirected``, ``misnamed``).
    Fused experts are no modules.
    """
    config = model.config.get_text_config()
    away = tuple(f"{name}." for name in [*out_of_reach(model), *beyond_text(model)[1], *misnamed(model)])
    refused = redirected(model) | (_MAMBA_MODULES if config.model_type in _MAMBA_FAMILIES else set())
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
        and module is not head
        and not _ROUTER.search(name)
        and not _READ_DIRECTLY.search(name)
        and not f"{name}.".startswith(away)
        and name.rpartition(".")[2] not in refused
    ]


def redirected(model: Any) -> set[str]:
    """Return the names of linear modules that peft takes for fused experts in this family, whatever module has them.

    In checkpoints of earlier versions of transformers the experts of these families had these names. So peft cannot
    adapt a dense layer or a shared expert of such a name, neither now nor when it opens a saved adapter.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=list(_EARLIER_NAMES))
    convert_peft_config_for_transformers(config, model, None)
    return _EARLIER_NAMES - set(config.target_modules or ())


def misnamed(model: Any) -> list[str]:
    """Return the names of linear modules whose adapters peft would not find again when it opens them.

    It applies to an adapter's names the patterns that convert checkpoints of the family. A pattern that also matches
    present names changes them (Laguna: shared_experts).
    """
    if get_checkpoint_conversion_mapping(model.config.model_type) is None:
        return []
    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    names = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    saved = {name: f"base_model.model.{name}.lora_A.weight" for name in names}
    return [name for name, key in saved.items() if apply_renamings(key, renamings) != key]


def split_targets(model: Any, targets: list[str]) -> tuple[list[str], list[str]]:
    """Divide names of ``lora_target_modules`` into those of modules and those of parameters, such as fused experts."""
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    fused = [t for t in targets if not _matches(t, modules) and _matches(t, parameters)]
    return [t for t in targets if t not in fused], fused


def _matches(target: str, names: list[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)


def fused_experts(model: Any) -> list[str]:
    """Return the last two parts of the names of fused experts, as ``lora_target_modules`` takes them."""
    names = (n for n, p in model.named_parameters() if p.ndim == 3 and _EXPERTS.search(n) and "lora_" not in n)
    return list(dict.fromkeys(".".join(name.split(".")[-2:]) for name in names))


def aux_loss_coef(model: Any, router_aux_loss_coef: float | None) -> float:
    """Return the weight of the routers' auxiliary loss.

    Args:
        router_aux_loss_coef: of the recipe; None: the model's own if its config asks for the loss, else 0.
    """
    if router_aux_loss_coef is not None:
        return router_aux_loss_coef
    if not has_router_loss(model) or not getattr(model.config.get_text_config(), "output_router_logits", False):
        return 0.0
    return float(getattr(model, "router_aux_loss_coef", None) or getattr(model, "aux_loss_coef", None) or 0.0)


def has_router_loss(model: Any) -> bool:
    """Return whether the model's own forward can compute an auxiliary loss of its routers."""
    return "output_router_logits" in inspect.signature(type(model).forward).parameters


def check_parts(settings: MethodSettings, meta_model: Any, router_aux_loss_coef: float | None = None) -> list[Problem]:
    """Check that the model has what the method and the auxiliary loss need, before any weight is read."""
    problems, name = [], type(meta_model).__name__
    if router_aux_loss_coef is not None and not has_router_loss(meta_model):
        found = f"{router_aux_loss_coef:g}, but {name} computes no auxiliary loss of routers"
        problems.append(Problem("router_aux_loss_coef", found, fix="leave it out"))
    if getattr(meta_model.config, "rescale_every", 0):
        found = f"rescale_every {meta_model.config.rescale_every}: {name} divides its weights whenever it evaluates"
        fix = 'write "rescale_every": 0 into its config.json; only float16 needs it'
        problems.append(Problem("model_name_or_path", found, "weights that only training changes", fix))
    if settings.method == "full" and _is_only_a_part(meta_model.config):
        found = f"final/ of a full run could not be opened: transformers knows {name} only as a part of another model"
        problems.append(Problem("method", found, fix="use --method lora"))
    if settings.method == "qlora" and not any(
        kind == "4-bit" for kind, _, _ in _weights(quantised_on_meta(meta_model))
    ):
        kinds = {type(module).__name__ for module in meta_model.modules() if isinstance(module, torch.nn.Linear)}
        found = f"qlora would quantise none of the weights of {name}"
        why = f": its linear layers are {', '.join(sorted(kinds - {'Linear'}))}, which bitsandbytes does not know"
        problems.append(Problem("method", found + (why if kinds - {"Linear"} else ""), fix="use --method lora"))
    return problems


def _weights(model: Any) -> Iterator[tuple[str, torch.nn.Parameter, int]]:
    """Yield for each parameter its kind in words, itself, and its number of values (those that 4 bits stand for).

    Tied ones come once, as the embedding that comes first.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if type(module).__name__ == "Linear4bit" and name == "weight":
                yield "4-bit", parameter, module.in_features * module.out_features
            elif "lora_" in prefix:
                yield "adapters", parameter, parameter.numel()
            elif parameter.ndim == 3 and _EXPERTS.search(f"{prefix}."):
                yield "fused experts", parameter, parameter.numel()
            else:
                yield type(module).__name__, parameter, parameter.numel()


def _is_only_a_part(config: Any) -> bool:
    """Whether transformers knows the config, but opens no causal model by its type (the text of Llama 3.2 Vision)."""
    own = type(config).__module__.startswith("transformers.")
    return own and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def describe_parts(model: Any, settings: MethodSettings, router_aux_loss_coef: float | None = None) -> list[str]:
    """Describe in one line what the method made of the model; further lines say what it could not do.

    Args:
        model: with adapters, as ``build_model`` returns it before it is wrapped, or on meta for a dry run.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    total: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    for kind, parameter, number in _weights(model):
        total[kind] += number
        trained[kind] += number if parameter.requires_grad else 0
    num_base, num_all = total.total() - total["adapters"], total.total()
    adapted = Counter(type(m.get_base_layer()).__name__ for m in model.modules() if hasattr(m, "lora_A"))
    parts = [f"weights: {num_base:,} parameters"]
    if settings.method == "qlora":
        parts.append(f"{total['4-bit'] / num_base:.1%} in 4 bit")
    if adapted:
        parts.append("adapters on " + ", ".join(f"{number} {kind}" for kind, number in adapted.most_common()))
    parts.append("trained: " + _shares(trained, num_all))
    if frozen := total - trained:
        parts.append("frozen: " + _shares(frozen, num_all))
    lines = ["; ".join(parts)]
    experts = f"{total['fused experts'] / num_base:.0%}"
    if settings.method == "qlora" and (rest := 1 - total["4-bit"] / num_base) > _LARGE_SHARE:
        which = f" ({experts} are fused experts, which bitsandbytes does not load)" if total["fused experts"] else ""
        lines.append(f"warning: qlora leaves {rest:.0%} of the parameters unquantised{which}")
    if settings.method != "full" and settings.lora_target_modules == "all-linear" and not settings.adapter_name_or_path:
        if names := fused_experts(base):
            named = ",".join(names)
            found = f"note: all-linear leaves out fused experts ({experts} of the parameters)"
            lines.append(f"{found}; --lora_target_modules takes their names too: {named}")
        if shared := _left_out(base):
            lines.append(f"note: peft would take {_few(shared)} for fused experts: not adapted")
        if lost := misnamed(base):
            lines.append(f"note: peft would not find adapters of {_few(lost)} again: not adapted")
    if away := out_of_reach(base):
        lines.append(f"note: text does not reach {_few(away)}: frozen" + (", not adapted" if adapted else ""))
    if coefficient := aux_loss_coef(base, router_aux_loss_coef):
        lines.append(f"note: the training loss contains {coefficient:g} x the auxiliary loss of the routers")
    if settings.attn_implementation == "auto" and base.config._attn_implementation == "eager":
        lines.append(f"note: eager attention, because {type(base).__name__} takes no sdpa")
    return lines


def _left_out(model: Any) -> list[str]:
    """Patterns of the linear modules that ``redirected`` keeps from an adapter, with * for the number of a layer."""
    names = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    kept = (name for name in names if name.rpartition(".")[2] in redirected(model) and not _ROUTER.search(name))
    return list(dict.fromkeys(re.sub(r"\.\d+", ".*", name) for name in kept))


def _shares(counts: Counter[str], total: int) -> str:
    """The largest kinds with their shares of ``total``."""
    kinds = [(kind, number) for kind, number in counts.most_common() if number]
    shares = [f"{kind} {number / total:.2%}" for kind, number in kinds[:3]]
    return ", ".join(shares + (["others"] if len(kinds) > 3 else [])) or "nothing"


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
