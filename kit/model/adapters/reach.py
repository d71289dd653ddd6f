"""Which parameters receive gradients from text-only batches: the others are frozen, and not adapted.

A forward pass on the meta device finds most of them. It reads no weights and computes only shapes, so it takes seconds,
whatever the size of the model. A family whose forward needs values (tokens per expert, where a patch begins) cannot be
traced. There the names of ``_SELECTORS`` count, and the first step of training refuses what got no gradient.
"""

import copy
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from kit.model.layers.attention import without_search_for_packs

# Routing-only parts, which get no gradient: which keys or experts a token sees, where a patch begins.
_SELECTORS = re.compile(r"(^|\.)(indexer|patcher|\w*score_correction_bias|expert_bias)$")
_TRACED_TOKENS = 16


class Trace(NamedTuple):
    """What a forward pass of text leaves out, by names; both are empty if it could not be traced.

    Weights of a module that is not called may get a gradient all the same: if the model reads them itself, or another
    module is tied to them.
    """

    parameters_without_gradient: Sequence[str] = ()
    uncalled_modules: Sequence[str] = ()  # linear ones


_traces: dict[tuple[type, str], Trace] = {}


def belongs_to_selector(name: str) -> bool:
    """Return whether a parameter belongs to a routing-only part, which selects keys or experts."""
    return any(_SELECTORS.search(part) for part in [*parents(name), name])


def unreached_parts(model: Any) -> list[str]:
    """Return the names of modules and parameters to which a batch of text sends no gradient.

    These are vision and audio encoders with their projectors, cross-attention to images or to an absent encoder, and
    routing-only parts (router bias corrections, sparse-attention indexers).

    Args:
        model: a base model, without adapters.
    """
    parameters = dict(model.named_parameters())
    unreached = {id(parameters[name]) for name in trace(model).parameters_without_gradient if name in parameters}
    if model.config.get_text_config() is not model.config:  # a model of more than text
        text_parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
        reached = {id(p) for part in text_parts if part is not None for p in part.parameters()}
        unreached |= {id(p) for p in parameters.values()} - reached
    names = [name for name in [*(name for name, _ in model.named_modules()), *parameters] if _SELECTORS.search(name)]
    for name, module in model.named_modules():
        owned = list(module.parameters())
        if owned and all(id(parameter) in unreached for parameter in owned):
            names.append(name)
    names += [name for name, parameter in parameters.items() if id(parameter) in unreached]
    unique = dict.fromkeys(names)
    return [name for name in unique if not any(parent in unique for parent in parents(name))]  # not within another


def freeze_unreached_parts(model: Any, kept: Collection[int] = ()) -> tuple[str, ...]:
    """Freeze what gets no gradient from text, for which DDP would wait.

    Args:
        kept: ``id`` of parameters that train on images.

    Returns:
        The names of these modules and parameters, with a dot at the end.
    """
    prefixes = tuple(f"{name}." for name in unreached_parts(model))
    for name, parameter in model.named_parameters():
        if f"{name}.".startswith(prefixes) and id(parameter) not in kept:
            parameter.requires_grad_(False)
    return prefixes


def parents(name: str) -> list[str]:
    """The names of the modules that contain a module or parameter: ``a`` and ``a.b`` for ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def trace(model: Any) -> Trace:
    """Trace the model's forward on meta.

    Args:
        model: a base model, without adapters, on any device.
    """
    key = (type(model), model.config.to_json_string(use_diff=False))
    if key not in _traces:
        _traces[key] = Trace()
        # The code of any family may fail, also code from the hub.
        with suppress(Exception), torch.device("meta"), torch.enable_grad():
            _traces[key] = _trace(type(model)._from_config(copy.deepcopy(model.config)))
    return _traces[key]


def _trace(model: Any) -> Trace:
    """``model`` is on meta, and changed: it is of no further use."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # shapes that do not depend on the routing
    called: set[str] = set()
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    for name, module in linear:
        module.register_forward_pre_hook(lambda module, inputs, name=name: called.add(name))
    # DeepSeek V4 compresses windows of 128 tokens, and leaves these layers out if there are fewer.
    windows = getattr(model.config.get_text_config(), "compress_rates", None) or {}
    input_ids = torch.zeros(1, max(_TRACED_TOKENS, *windows.values(), 0), dtype=torch.int64)
    with without_search_for_packs():
        output = model.eval()(input_ids=input_ids, use_cache=False)  # eval: no layer is dropped by chance
    # Of a base model its states. A router loss, if its config asks for one, would come before the logits.
    reached = _leaves(output.get("logits", next(iter(output.values()))).grad_fn)
    return Trace(
        parameters_without_gradient=[name for name, p in model.named_parameters() if id(p) not in reached],
        uncalled_modules=[name for name, _ in linear if name not in called],
    )


def _leaves(root: Any) -> set[int]:
    """The ``id`` of each parameter that the graph of autograd under the node ``root`` leads to."""
    found: set[int] = set()
    seen = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return found
