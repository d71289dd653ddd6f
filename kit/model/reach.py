"""Which parts of a model a batch of text reaches: the others are frozen, and not adapted.

A forward pass on the meta device finds most of them. It reads no weights and computes only shapes, so it takes seconds,
whatever the size of the model. A family whose forward needs values (tokens per expert, where a patch begins) cannot be
traced. There the names of ``_CHOOSERS`` count, and the first step of training refuses what got no gradient.
"""

import copy
import re
from contextlib import suppress
from itertools import accumulate
from typing import Any

import torch

from kit.model.attention import without_search_for_packs

# Parts that only choose, so that no gradient reaches them: which keys or experts a token sees, where a patch begins.
_CHOOSERS = re.compile(r"(^|\.)(indexer|patcher|\w*score_correction_bias|expert_bias)$")
_TRACED_TOKENS = 16
_traced: dict[tuple[type, str], tuple[list[str], list[str]]] = {}


def only_chooses(name: str) -> bool:
    """Return whether a parameter belongs to a part that only chooses: keys or experts."""
    return any(_CHOOSERS.search(part) for part in accumulate(name.split("."), "{}.{}".format))


def out_of_reach(model: Any) -> list[str]:
    """Return the names of modules and parameters to which a batch of text sends no gradient.

    These are towers for images and sound with their projectors, attention to an encoder that is not there, and parts
    that only choose.

    Args:
        model: a base model, without adapters.
    """
    config = model.config.get_text_config()
    parameters = dict(model.named_parameters())
    everything = [name for name, _ in model.named_modules()] + list(parameters)
    names = [name for name in everything if _CHOOSERS.search(name) or _is_skipped_layer(name, config)]
    unreached = {id(parameters[name]) for name in beyond_text(model)[0] if name in parameters}
    if config is not model.config:
        heads = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
        reached = {id(p) for part in heads if part is not None for p in part.parameters()}
        unreached |= {id(p) for p in parameters.values()} - reached
    modules = [
        name
        for name, module in model.named_modules()
        if (owned := list(module.parameters())) and all(id(p) in unreached for p in owned)
    ]
    return _outermost(names + modules + [name for name, p in parameters.items() if id(p) in unreached])


def _outermost(names: list[str]) -> list[str]:
    """The names that do not lie within another of them."""
    given = dict.fromkeys(names)
    return [name for name in given if not any(part in given for part in _parents(name))]


def _parents(name: str) -> list[str]:
    return list(accumulate(name.split("."), "{}.{}".format))[:-1]


def freeze_out_of_reach(model: Any) -> None:
    """Freeze what no text reaches: it gets no gradients, for which DDP would wait."""
    away = tuple(f"{name}." for name in out_of_reach(model))
    for name, parameter in model.named_parameters():
        if f"{name}.".startswith(away):
            parameter.requires_grad_(False)


def _is_skipped_layer(name: str, config: Any) -> bool:
    """Whether a layer attends to images only, and is skipped without any (Llama 3.2 Vision)."""
    number = name.rpartition("layers.")[2]
    return name.endswith(f"layers.{number}") and number in map(str, getattr(config, "cross_attention_layers", ()) or ())


def beyond_text(model: Any) -> tuple[list[str], list[str]]:
    """Trace the model's forward on meta. Returns nothing if it cannot be traced.

    Args:
        model: a base model, without adapters, on any device.

    Returns:
        The names of parameters that get no gradient, and of linear modules that are not called. Weights of a module
        that is not called may get a gradient all the same: if the model reads them itself, or another module is tied.
    """
    key = (type(model), model.config.to_json_string(use_diff=False))
    if key not in _traced:
        _traced[key] = ([], [])
        with suppress(Exception), torch.device("meta"):  # the code of any family, and of strangers
            _traced[key] = _trace(type(model)._from_config(copy.deepcopy(model.config)))
    return _traced[key]


def _trace(model: Any) -> tuple[list[str], list[str]]:
    """``model`` is on meta, and is thrown away afterwards."""
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
        logits = model.eval()(input_ids=input_ids, use_cache=False).logits  # eval: no layer is dropped by chance
    reached, seen, waiting = set(), set(), [logits.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        reached.add(id(getattr(node, "variable", None)))
        waiting += [following for following, _ in node.next_functions]
    unreached = [name for name, parameter in model.named_parameters() if id(parameter) not in reached]
    return unreached, [name for name, _ in linear if name not in called]
