"""Quantisation-aware training (QAT): linear layers compute with fake-quantised weights and activations.

torchao rounds them (fake quantisation, the "prepare" step of its ``QATConfig``), and its own autograd passes gradients
through the rounding. ``SCHEMES`` says what is rounded; ``layers`` says where.

Promises:

- Each group of weights and each token has its own scale. So packs, micro-batches and any number of processes give the
  same gradients.
- Weights are rounded in the dtype that multiplies them, as a sharded weight arrives. In that dtype a layer that torchao
  quantises by ``quantised_as`` computes bit for bit what was trained.
- The weights that train, their names, and what is saved stay plain.
- The base of adapters is rounded once, as it is loaded, for it does not change. Adapters are not rounded.

The output head and embeddings stay as they are: they do in exported models, see ``kit.export.compressed``.
"""

from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F

from kit.config.settings.method import MethodSettings
from kit.model.adapters.reach import trace, unreached_parts
from kit.model.layers.attention import computed_dtype
from kit.system.errors import Problem

# By torchao's names: the bits of a weight, and whether inputs are rounded to 8 bits, each token by itself.
SCHEMES = {
    "int4_weight_only": (4, False),
    "int8_weight_only": (8, False),
    "int8_dynamic_activation_int4_weight": (4, True),
    "int8_dynamic_activation_int8_weight": (8, True),
}


def quantised_as(settings: MethodSettings) -> Any:
    """Return torchao's config of the quantised model that ``qat`` trains for."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerAxis, PerGroup

    bits, rounds_inputs, size = scheme_of(settings)
    granularity = PerGroup(size) if size else PerAxis(0)
    dtype = getattr(torch, f"int{bits}")
    if rounds_inputs:
        return Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=granularity)
    return IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity)


def layers(model: Any) -> dict[str, torch.nn.Linear]:
    """Return the layers that are rounded, by name: linear ones that text calls, but for the output head.

    Args:
        model: without adapters; it may be on meta.
    """
    head = set(model.get_output_embeddings().modules())
    uncalled = set(trace(model).uncalled_modules)  # the model reads their weights itself
    unreached = tuple(f"{name}." for name in unreached_parts(model))
    return {
        name: module
        for name, module in model.named_modules()
        # Subclasses may compute something else.
        if type(module) is torch.nn.Linear
        and module not in head
        and name not in uncalled
        and not f"{name}.".startswith(unreached)
    }


def install_qat(model: Any, settings: MethodSettings) -> None:
    """Let the layers of ``layers`` compute as ``qat`` says. Call this before adapters are attached."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    plain = layers(model)
    config = QATConfig(quantised_as(settings), step="prepare")
    quantize_(model, config, filter_fn=lambda _, name: name in plain)
    for name, layer in plain.items():
        rounding = model.get_submodule(name)
        rounding.weight, rounding.bias = layer.weight, layer.bias  # torchao makes new ones of those on meta
        if settings.method == "full":
            rounding.forward = MethodType(_forward, rounding)
            continue
        if not layer.weight.is_meta:
            with torch.no_grad():
                layer.weight.copy_(rounding.weight_fake_quantizer(layer.weight))
        rounding.weight_fake_quantizer = None
        if rounding.activation_fake_quantizer is None:
            model.set_submodule(name, layer)


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute y [..., o] from x [..., i]. Autocast would cast after the rounding."""
    dtype = computed_dtype(x)
    x = x.to(dtype)
    if self.activation_fake_quantizer is not None:
        x = self.activation_fake_quantizer(x)
    return F.linear(x, self.weight_fake_quantizer(self.weight.to(dtype)), self.bias)


def check_qat(settings: MethodSettings, meta_model: Any) -> list[Problem]:
    """Return why the ``qat`` of ``settings`` cannot be used, before any weight is read."""
    if find_spec("torchao") is None:
        return [Problem("qat", "torchao is not installed", fix="pip install torchao")]
    return check_layers(meta_model, scheme_of(settings)[2], "qat")


def check_layers(meta_model: Any, group_size: int | None, field: str) -> list[Problem]:
    """Return why no layer can be quantised, or not in groups of this size.

    Args:
        group_size: weights of a row that share a scale; None: a whole row.
        field: the setting that quantises, for messages.
    """
    rounded = layers(meta_model)
    if not rounded:
        found = f"{type(meta_model).__name__} has no torch.nn.Linear layer, and no other is quantised"
        return [Problem(field, found, fix="leave it out")]
    for name, layer in rounded.items():
        if group_size and layer.in_features % group_size:
            found = f"groups of {group_size} weights, and {name} has rows of {layer.in_features}"
            return [Problem(field, found, "a group size that divides the rows of all layers")]
    return []


def scheme_of(settings: MethodSettings) -> tuple[int, bool, int | None]:
    """Return the bits of a weight, whether inputs are rounded, and how many weights share a scale; None: a row's."""
    bits, rounds_inputs = SCHEMES[settings.qat or ""]
    return bits, rounds_inputs, settings.qat_group_size or (32 if bits == 4 else None)


def describe_qat(settings: MethodSettings) -> str:
    """Return a line that says what is rounded."""
    bits, rounds_inputs, size = scheme_of(settings)
    groups = f"in groups of {size}" if size else "per row"
    inputs = ", activations to 8 bits per token" if rounds_inputs else ""
    once = "" if settings.method == "full" else "; the adapter is not rounded"
    return f"qat: linear layers, except the head: weights rounded to {bits} bits {groups}{inputs}{once}"
