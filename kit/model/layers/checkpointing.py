"""Activation (gradient) checkpointing: what a decoder layer keeps for the backward pass, and what it recomputes.

Promises: losses and gradients are those without checkpointing, also with dropout. Importing this needs no torch, so
that memory can be planned without it (``kit.memory.activations``).

- ``True``: a layer keeps its input.
- ``"selective"``: it keeps also what is dear to compute again, the results of attention kernels and of matrix products.
  Norms, activations, rotary embeddings, casts and the narrow products of adapters are computed again.
"""

from collections import defaultdict, deque
from typing import Any, Literal

from kit.system.console import say
from kit.system.errors import UserError

Checkpointing = bool | Literal["selective"]

# A product with a side of at most this, such as those of adapters, costs less to compute again than to keep: its
# operations are 2 times this for each value, and a GPU does some hundreds in the time in which it writes a value.
NARROW = 64

# Which argument of a product has its rows [..., inputs]. Products of batches (bmm) are not here: they make eager
# attention's scores [T, T].
_PRODUCTS = {"mm": 0, "addmm": 1, "gemm_4bit": 0, "_scaled_mm": 0, "_grouped_mm": 0}
# They may change the result of a product in place right after it: an adapter's part is added to it, or a bias.
_ADDS_IN_PLACE = {"addmm_", "add_", "add_product_"}


def is_wide(inputs: int, outputs: int) -> bool:
    """Return whether ``"selective"`` keeps the result of a product of rows [.., inputs], which is [.., outputs]."""
    return min(inputs, outputs) > NARROW


def enable_checkpointing(model: Any, how: Checkpointing | Literal["auto"]) -> None:
    """Let the decoder layers of a model of transformers checkpoint in training. Call this when it has its adapters.

    With ``auto`` nobody chose, as no training was planned: then they do not.
    """
    if how in (False, "auto"):
        return
    if not model.supports_gradient_checkpointing:
        say(f"warning: gradient_checkpointing: {type(model).__name__} has none in transformers: more memory is needed")
        return
    # The other, reentrant way loses gradients of arguments that are passed by name.
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = _contexts
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    # For the reentrant way, transformers has just let the embedding's output need a gradient. Without that, nothing
    # before the first adapter is computed backward.
    model.disable_input_require_grads()


def _contexts() -> tuple[Any, Any]:
    """The contexts of one layer: that of its forward pass, and that of its recomputation."""
    import torch
    from torch.utils.checkpoint import SAC_IGNORED_OPS, create_selective_checkpoint_contexts

    # FSDP1 marks its gathers for the profiler, in a recomputation not always as often as in the forward pass.
    marks = torch.ops.profiler
    SAC_IGNORED_OPS.update((marks._record_function_enter_new.default, marks._record_function_exit._RecordFunction))
    # Torch's own check refuses each change in place of what is kept. ``_Kept`` allows the ones that it can follow.
    return create_selective_checkpoint_contexts(_Kept(), allow_cache_entry_mutation=True)


class _Kept:
    """Decides for each operation of one layer's forward pass whether its result is kept."""

    def __init__(self) -> None:
        self._storages: set[int] = set()  # of the results that are kept
        self._decisions: dict[Any, deque[bool]] = defaultdict(deque)  # by operation: FSDP2 gathers only the first time

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        """Return whether to keep the result of ``op``. torch 2.12 asks again when it recomputes the layer."""
        if context.is_recompute:
            return self._decisions[op].popleft()
        self._decisions[op].append(self._keeps(context, op, args, kwargs))
        return self._decisions[op][-1]

    def _keeps(self, context: Any, op: Any, args: Any, kwargs: Any) -> bool:
        name = op._overloadpacket.__name__ if hasattr(op, "_overloadpacket") else op.__name__
        if "attention" in name or "attn" in name:
            return not _drops(op, args, kwargs)
        if name in _PRODUCTS and is_wide(args[_PRODUCTS[name]].shape[-1], context.op_output.shape[-1]):
            self._storages.add(_storage(context.op_output))
            return True
        if not self._storages or not getattr(op, "_schema", None) or not op._schema.is_mutable:
            return False
        if _storage(args[0]) not in self._storages:
            return False
        if name in _ADDS_IN_PLACE:
            # What is kept is the changed result, so the change must not be made again.
            return True
        found = f"selective, and this model changes the result of a product in place ({op})"
        raise UserError("gradient_checkpointing", found, fix="--gradient_checkpointing true")


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def _drops(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether an attention kernel draws random numbers for dropout.

    If it were not run again, what is drawn after it would be other numbers than in the forward pass.
    """
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" not in names:
        return False
    i = names.index("dropout_p")
    return bool(args[i] if i < len(args) else kwargs.get("dropout_p", op._schema.arguments[i].default_value))
