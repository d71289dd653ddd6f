"""Chunked cross-entropy: the loss of each supervised token from hidden states, without logits for all positions.

The loss is computed inside the forward of the output head, because under every strategy the weights of the head are
gathered there. Logits are computed only for positions that predict a supervised token, in chunks. They are not kept for
the backward pass:

- If the head is frozen, the forward pass also computes the gradient of each loss with respect to its hidden state. The
  backward pass multiplies each by the gradient that arrives for its loss. This is exact, because the loss of a target
  depends on one hidden state only.
- If the head is trained, the backward pass computes the logits again. The gradient of the head's weights is a sum over
  all targets, so it needs the gradients that arrive for their losses, which only the backward pass knows. The parts of
  the chunks are added up in float32, so that more chunks round no more than one.

A model with a classification or embedding head returns what it computes of the tokens asked for, and no losses.

A caller may give a function of the logits, whose values take the place of the losses. Then the backward pass computes
the logits again, whether the head trains or not: one path, and any number of values for a target.

If the forward of a model class does something unknown between decoder and logits, its own full logits are used: this
needs more memory and time, but is never wrong. ``kit.train.checks`` proves before the first step that what is taken
for known gives the losses of these logits.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from kit.model.layers.attention import VARLEN, needs_mask, without_search_for_packs
from kit.model.layers.chunks import chunk_size
from kit.model.layers.embedding_noise import changed_embeddings
from kit.model.layers.packs import family_of, has_alibi, install_packs, masks_of_packs
from kit.model.layers.sequence_group import SequenceGroup
from kit.model.layers.sequence_parallel import SequenceSlice
from kit.model.pretrained.heads import head_of
from kit.system.errors import UserError

# Arguments with the bounds of packed samples. Only variable-length attention uses them; others use position_ids.
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")

# Computes values of the targets in a chunk, float32 [C] or [C, K], from their logits, float32 [C, V]. The index says
# which of the S targets these are: a slice, or int64 [C] with sequence parallelism; there may be none (C = 0).
TargetValues = Callable[[torch.Tensor, slice | torch.Tensor], torch.Tensor]
ChangeEmbeddings = Callable[[torch.Tensor], torch.Tensor]  # of the input embeddings [B, T, d]


def install_loss_head(
    model: Any,
    chunk_tokens: int | None = None,
    router_aux_loss_coef: float = 0.0,
    device_memory: int | None = None,
    compiler: Any = None,
    gives_states: bool = False,
    sequence_group: SequenceGroup | None = None,
    always_encodes: bool = True,
) -> None:
    """Change a causal language model so that it can return the loss of each target.

    Call this before the model is wrapped, when it is known which weights train. It sets ``model.uses_own_logits``:
    whether the losses come from the logits of the model's own forward. Afterwards
    ``model(input_ids, ..., target_positions=P, targets=Y)`` returns the cross-entropy of each target in nats,
    float32 [S]. P int64 [S] holds the flat positions ``b * T + t``, and Y int64 [S] the ids that they predict. Calls
    without ``targets`` work as before. In a packed call ``token_mask`` [B, T] is 0 for padding, which the auxiliary
    loss leaves out. More arguments of a call with ``targets``:

    - ``target_values``, a ``TargetValues``: the model returns its values, float32 [S] or [S, K], instead of the losses.
    - ``dummy_media``: inputs of an encoder without images in the batch. If it is sharded or trains, it computes them,
      and nothing depends on the result: so a rank without an image has the collectives, and the zero gradients, of
      those with some. A call without ``targets`` takes it too.
    - ``change_embeddings``: a function of the input embeddings, [B, T, d], whose result is computed with instead.
    - ``with_router_loss=True``: the model returns a pair, of the losses or values, and of the auxiliary loss of the
      routers times its coefficient, []; None if the model has no such loss.

    Args:
        chunk_tokens: positions per chunk of logits; None: see ``chunk_size``.
        router_aux_loss_coef: the coefficient; 0: no auxiliary loss.
        device_memory: bytes of the GPU; None: not a GPU.
        compiler: a ``Compiler`` for what is computed from the logits, so that they are read few times; or None.
        gives_states: a call with targets returns the hidden states that predict them, [S, h], and no losses.
            ``model.transform_logits`` is what the model does to the head's output. So does a model of embeddings; one
            of scores returns these, float32 [S, labels].
        sequence_group: the sequence-parallel group. Each rank makes the same calls, with whole rows, and
            gets all losses, values or states; their gradients reach only what depends on its own tokens. Calls without
            targets, and the model's own logits, are not shared.
        always_encodes: ``dummy_media`` is computed: an encoder is sharded, or trains.
    """
    kind = head_of(model.config)
    head = model.get_output_embeddings()
    plain_head_forward: Any = getattr(head, "forward", None)
    plain_model_forward = model.forward
    transform = _logit_transform(model) if kind == "lm" else _unchanged
    if kind != "lm":
        chunk_tokens = 1
    elif chunk_tokens is None:
        vocab_size, trains = model.config.get_text_config().vocab_size, _trains(head)
        chunk_tokens = chunk_size(vocab_size, head.weight.shape[-1], trains, device_memory)
    head_losses: Any = _HeadLosses(head, transform, chunk_tokens, compiler) if kind == "lm" else None
    model_losses = _ModelLosses(model, router_aux_loss_coef, sequence_group, always_encodes)
    model.uses_own_logits = kind == "lm" and (transform is None or _decoder(model) is None)
    model.transform_logits = transform

    # Functions bound to the modules: Accelerate takes the function out of ``model.forward``, and binds it again.
    def head_forward(
        self: Any,
        hidden: torch.Tensor,
        targets: torch.Tensor | None = None,
        target_values: TargetValues | None = None,
    ) -> torch.Tensor:
        if targets is None:
            return plain_head_forward(hidden)
        if gives_states:
            return hidden
        if head_losses is None:
            return plain_head_forward(hidden).float()
        return head_losses(hidden, targets, target_values)

    def model_forward(
        self: Any,
        *args: Any,
        targets: Any = None,
        target_positions: Any = None,
        token_mask: Any = None,
        target_values: TargetValues | None = None,
        with_router_loss: bool = False,
        change_embeddings: ChangeEmbeddings | None = None,
        **kwargs: Any,
    ) -> Any:
        if targets is None:
            model_losses.begin_packs(None)
            dummy = kwargs.pop("dummy_media", None)
            is_prompt = dummy is not None and kwargs["input_ids"].shape[1] > 1
            with changed_embeddings(self, model_losses.with_dummy_media(None, dummy if is_prompt else None)):
                return plain_model_forward(*args, **kwargs)
        wanted = _Wanted(targets, target_positions, target_values, with_router_loss)
        dummy = kwargs.pop("dummy_media", None)
        shared = model_losses.share(self, wanted, kwargs)
        if shared and change_embeddings:
            change_embeddings = shared.change(change_embeddings)
        with changed_embeddings(self, model_losses.with_dummy_media(change_embeddings, dummy)):
            own = self.uses_own_logits or model_losses.beside_decoder(kwargs | (dummy or {}))
            losses, router_loss = model_losses(self, wanted, token_mask, args, kwargs, shared, own)
        return (losses, router_loss) if with_router_loss else losses

    # `generate` reads it: a model that takes positions must be given those of rows that are padded on the left.
    signature: Any = inspect.signature(plain_model_forward)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    dummy = inspect.Parameter("dummy_media", inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = [itself, *signature.parameters.values()]
    is_last = parameters[-1].kind == inspect.Parameter.VAR_KEYWORD
    parameters.insert(len(parameters) - is_last, dummy)
    model_forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    if head is not None:
        head.forward = MethodType(head_forward, head)
    model.forward = MethodType(model_forward, model)


class _Wanted(NamedTuple):
    """What a call of the model asks for."""

    targets: torch.Tensor  # int64 [S]
    target_positions: torch.Tensor  # int64 [S]
    target_values: TargetValues | None  # instead of the losses
    router_loss: bool

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states that predict a supervised token, [S, h], of all, [B, T, h]."""
        return hidden.flatten(0, 1).index_select(0, self.target_positions)

    def at(self, shared: SequenceSlice) -> "_Wanted":
        """What is asked of this rank, which has some of the targets."""
        of_own: TargetValues | None = None
        if of_whole := self.target_values:

            def of_own(logits: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
                return of_whole(logits, shared.at[rows])

        return _Wanted(self.targets[shared.at], shared.target_positions, of_own, self.router_loss)


class _HeadLosses:
    """The losses that an output head computes from hidden states."""

    def __init__(self, head: Any, transform: Any, chunk_tokens: int, compiler: Any) -> None:
        """``transform``: what the model's forward applies to the head's output."""
        self._is_compiled = compiler is not None
        self._cross_entropy: Any = compiler.compile(_cross_entropy) if compiler else _cross_entropy
        self._softmax_loss: Any = compiler.compile(_softmax_loss) if compiler else _softmax_loss
        self._head = head
        self._plain_forward = head.forward
        self._transform = transform
        self._is_linear = getattr(head.forward, "__func__", None) is torch.nn.Linear.forward
        self._trains = _trains(head)
        self._chunk_tokens = chunk_tokens

    def __call__(
        self, hidden: torch.Tensor, targets: torch.Tensor, target_values: TargetValues | None = None
    ) -> torch.Tensor:
        """Return the loss of each target, float32 [S], or its values, from hidden states [S, h]."""
        if target_values is None and torch.is_grad_enabled() and not self._trains:
            return _LossWithGradient.apply(
                hidden, targets, self._plain_forward, self._transform, self._softmax_loss, self._chunk_tokens
            )
        losses = []
        start = 0
        # The recomputation of a compiled function cannot end within it.
        with _weights_cast_once(hidden.device.type), set_checkpoint_early_stop(not self._is_compiled):
            head_forward = self._plain_forward
            if torch.is_grad_enabled() and self._is_linear and self._head.weight.requires_grad:
                head_forward = _LinearWithSum(self._head, hidden.device.type)
            # Without targets there is one empty chunk, so that this rank still takes part in the backward pass.
            for chunk in hidden.split(self._chunk_tokens):
                rows = slice(start, start + len(chunk))
                start = rows.stop
                arguments = (chunk, targets[rows], rows, target_values, head_forward)
                if torch.is_grad_enabled():
                    losses.append(checkpoint(self.chunk_loss, *arguments, use_reentrant=False))
                else:
                    losses.append(self.chunk_loss(*arguments))
        return torch.cat(losses)

    def chunk_loss(
        self, hidden: torch.Tensor, targets: torch.Tensor, rows: slice, target_values: Any, head_forward: Any
    ) -> torch.Tensor:
        """Return the loss of each target [C] of a chunk, or its values, by way of its logits [C, V]."""
        logits = head_forward(hidden)
        if self._transform is not _unchanged:
            logits = self._transform(logits.float())
        if target_values is None:
            losses: torch.Tensor = self._cross_entropy(logits, targets)
            return losses
        return _checked_values(target_values, logits.float(), rows)


class _LinearWithSum:
    """The matmuls of one call with a trainable linear head, whose gradient is accumulated over chunks in float32.

    Autograd would add them up in the dtype of the products. In bf16 the gradient of 128 chunks would have seven times
    the error of one chunk's.
    """

    def __init__(self, head: Any, device_type: str) -> None:
        self._head = head
        self._sums: list[torch.Tensor] = []  # float32 [V, h], once there is one
        self._stand_in = _GradientOfSum.apply(head.weight, self._sums)
        self._cast: torch.Tensor | None = None  # once for all chunks, also for those that the backward pass computes
        if torch.is_autocast_enabled(device_type):
            self._cast = head.weight.detach().to(torch.get_autocast_dtype(device_type))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [C, V] of hidden states [C, h]."""
        weight = self._head.weight.detach() if self._cast is None else self._cast
        return F.linear(hidden, _WithSum.apply(self._stand_in, weight, self._sums), self._head.bias)


class _GradientOfSum(torch.autograd.Function):
    """Stands for a weight in the graph, and gives it the sum as its gradient when all chunks have added their parts."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, sums: list[torch.Tensor]) -> torch.Tensor:
        ctx.sums, ctx.dtype = sums, weight.dtype
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *arriving: Any) -> Any:
        return ctx.sums.pop().to(ctx.dtype), None


class _WithSum(torch.autograd.Function):
    """Returns a weight, and adds the gradient that arrives for it to the sum."""

    @staticmethod
    def forward(ctx: Any, stand_in: torch.Tensor, weight: torch.Tensor, sums: list[torch.Tensor]) -> torch.Tensor:
        ctx.sums = sums
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *arriving: Any) -> Any:
        if ctx.sums:
            ctx.sums[0].add_(arriving[0])
        else:
            ctx.sums.append(arriving[0].to(torch.float32, copy=True))
        return None, None, None


def _trains(head: Any) -> bool:
    return any(parameter.requires_grad for parameter in head.parameters())


def _decoder(model: Any) -> Any:
    """The part of the model below its head; None if it is not known."""
    # The prefix is the name of a part of a composite model, which some text models do not have (Llama 4).
    return getattr(model, model.base_model_prefix, None) or getattr(model, "model", None)


class _ModelLosses:
    """The losses that a model computes from its inputs."""

    def __init__(
        self, model: Any, router_aux_loss_coef: float, sequence_group: SequenceGroup | None, always_encodes: bool
    ) -> None:
        self._sequence_group = sequence_group
        self._plain_forward = model.forward
        self._decoder = _decoder(model) or model.forward
        names = [hasattr(each, "get_image_features") for each in (self._decoder, model)]
        self._encoder = model if names == [False, True] else self._decoder
        # Some read images in the forward of the whole model (Llama 4), not in that of the decoder.
        of_images, of_whole, of_decoder = (
            set(inspect.signature(each).parameters) if each else set()
            for each in (
                getattr(self._encoder, "get_image_features", None),
                model.forward,
                getattr(self._decoder, "forward", self._decoder),
            )
        )
        self._beside_decoder = of_images & of_whole - of_decoder
        self._packs = install_packs(model)
        self._needs_mask = needs_mask(model.config)
        rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
        self._position_axes = len(rope.get("mrope_section", ()))
        self._router_aux_loss_coef = router_aux_loss_coef
        self._always_encodes = always_encodes

    def __call__(
        self,
        model: Any,
        wanted: _Wanted,
        token_mask: Any,
        args: Any,
        kwargs: Any,
        shared: SequenceSlice | None,
        own_logits: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss of each target, float32 [S], or its values; and the load-balancing loss, if asked for."""
        if shared:
            kwargs, wanted = shared.inputs(kwargs), wanted.at(shared)
        routers = wanted.router_loss and self._router_aux_loss_coef > 0
        uses_bounds = model.config._attn_implementation == VARLEN
        segment_lengths = kwargs.pop("segment_lengths", None)
        masks = without_search_for_packs()
        needs_masks = kwargs.get("cu_seq_lens_q") is not None and not uses_bounds
        if needs_masks:
            of_text = kwargs["position_ids"]  # [B, T], or the first of the axes of a model that reads images
            masks = masks_of_packs(model, of_text[0] if of_text.ndim == 3 else of_text)
        self.begin_packs(segment_lengths)
        kwargs = self._decoder_arguments(kwargs, uses_bounds, routers)
        if needs_masks and has_alibi(model):
            kwargs["attention_mask"] = torch.ones_like(kwargs["position_ids"])
        # Of packs that transformers finds, it would look up the images of a token by its position in its sample.
        has_blocks = not kwargs.keys().isdisjoint(("token_type_ids", "mm_token_type_ids"))
        of_blocks = without_search_for_packs() if has_blocks else nullcontext()
        with masks, of_blocks:
            if own_logits:
                options = {"output_router_logits": True} if routers else {}
                with _routers_see(model, token_mask):
                    outputs = self._plain_forward(*args, use_cache=False, **kwargs, **options)
                if head_of(model.config) == "scores":  # of the last token of each row
                    return outputs.logits.float(), None
                logits = outputs.logits.flatten(0, 1).index_select(0, wanted.target_positions).float()  # [S, V]
                if wanted.target_values:
                    losses = _checked_values(wanted.target_values, logits, slice(0, len(logits)))
                else:
                    losses = _cross_entropy(logits, wanted.targets)
                return losses, self._router_loss(outputs.aux_loss) if routers else None
            head = model.get_output_embeddings()
            if routers:
                with _routers_see(model, token_mask):
                    losses, aux_loss = _losses_and_aux_loss(self._plain_forward, head, wanted, *args, **kwargs)
                return losses, self._router_loss(aux_loss)
            losses = wanted.states(self._decoder(*args, use_cache=False, **kwargs).last_hidden_state)
        if head:
            losses = head(losses, targets=wanted.targets, target_values=wanted.target_values)
        return shared.gather(losses) if shared else losses, None

    def share(self, model: Any, wanted: _Wanted, kwargs: dict[str, Any]) -> SequenceSlice | None:
        """Return this rank's slice of the sequences; None without sequence parallelism."""
        if self._sequence_group is None or model.uses_own_logits:
            return None
        return SequenceSlice(self._sequence_group, kwargs["input_ids"], wanted.target_positions)

    def beside_decoder(self, names: Iterable[str]) -> bool:
        """Whether the decoder takes no argument of one of these names, but the whole model, for images."""
        return not self._beside_decoder.isdisjoint(names)

    def with_dummy_media(self, change: ChangeEmbeddings | None, dummy: Any) -> ChangeEmbeddings | None:
        """Return ``change`` of the embeddings, or one that also adds 0 times what the tower makes of ``dummy``.

        There the tower runs between embedding and layers, as it does for images that are seen: so sharded weights are
        gathered, and gradients reduced, in the same order on all ranks.
        """
        if dummy is None or not self._always_encodes:
            return change

        def changed(embeddings: torch.Tensor) -> torch.Tensor:
            features = tree_leaves(_features(self._encoder, dummy))
            zero = 0.0 * torch.stack([each.sum() for each in features if isinstance(each, torch.Tensor)]).sum()
            embeddings = embeddings if change is None else change(embeddings)
            return embeddings + zero.to(embeddings.dtype)

        return changed

    def begin_packs(self, segment_lengths: tuple[int, ...] | None) -> None:
        """Give the samples of the next forward pass to the layers that see one at a time; None: it is not packed."""
        if self._packs:
            self._packs.begin(segment_lengths)

    def _router_loss(self, aux_loss: Any) -> torch.Tensor | None:
        """The auxiliary loss times its coefficient. Families that may have experts give None or 0 if they have none."""
        return self._router_aux_loss_coef * aux_loss if isinstance(aux_loss, torch.Tensor) else None

    def _decoder_arguments(self, kwargs: dict[str, Any], uses_bounds: bool, routers: bool) -> dict[str, Any]:
        """The arguments that are given and that the decoder takes."""
        left_out = {"labels", "logits_to_keep", "return_dict"}  # peft adds these
        if not uses_bounds:
            left_out.update(BOUNDS)
        # Rows are padded on the right. Causal attention never looks there, and without a mask it has a faster kernel.
        # But the statistics of routers leave padding out.
        if not self._needs_mask and not routers:
            left_out.add("attention_mask")
        given = {name: value for name, value in kwargs.items() if value is not None and name not in left_out}
        if self._position_axes and "position_ids" in given and given["position_ids"].ndim == 2:
            # [B, T] -> [1 + axes, B, T]: the place in the text, by which packs are found, and the axes of an image,
            # which are all the place in the text here.
            given["position_ids"] = given["position_ids"].expand(1 + self._position_axes, -1, -1)
        return given


def _weights_cast_once(device_type: str) -> Any:
    """Under autocast, let weights be cast once for all chunks: otherwise autocast keeps no copies in a run."""
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, torch.get_autocast_dtype(device_type), cache_enabled=True)


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of each target, float32 [C]. ``_softmax_loss`` computes the same for a frozen head, in less memory."""
    return F.cross_entropy(logits.float(), targets, reduction="none")


def _checked_values(target_values: TargetValues, logits: torch.Tensor, rows: slice) -> torch.Tensor:
    """Compute values of the targets of a chunk. Raises ``UserError`` if they cannot be trained on."""
    values = target_values(logits, rows)
    found = ""
    if values.ndim not in (1, 2) or len(values) != len(logits):
        found = f"target_values returned shape {list(values.shape)} for {len(logits)} targets"
    elif logits.requires_grad and not values.requires_grad:
        found = "target_values returned values without a gradient: they do not depend on the logits"
    if found:
        raise UserError("objective", found, "float32 [C] or [C, K] computed from the logits, a row each target")
    return values.float()


class _LossWithGradient(torch.autograd.Function):
    """The loss of each target under a frozen head. Keeps the gradients of the hidden states [S, h], but no logits."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, targets: torch.Tensor, *options: Any) -> torch.Tensor:
        *functions, chunk_tokens = options
        losses = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)  # [S]
        gradients = torch.empty_like(hidden)  # [S, h], of each loss with respect to its own hidden state
        for start in range(0, len(targets), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            losses[rows], gradients[rows] = _loss_and_gradient(hidden[rows], targets[rows], *functions)
        ctx.save_for_backward(gradients)
        return losses

    @staticmethod
    def backward(ctx: Any, *arriving: Any) -> Any:
        (gradients,) = ctx.saved_tensors
        return (gradients * arriving[0][:, None]).to(gradients.dtype), *[None] * 5


def _loss_and_gradient(
    hidden: torch.Tensor, targets: torch.Tensor, head_forward: Any, transform: Any, softmax_loss: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the loss of each target [C], and its gradient with respect to its hidden state [C, h]."""
    chunk = hidden.detach().requires_grad_()
    with torch.enable_grad():
        logits = head_forward(chunk)
        if transform is not _unchanged:
            logits = transform(logits.float())
    losses, of_logits = softmax_loss(logits.detach(), targets)
    (gradient,) = torch.autograd.grad(logits, chunk, of_logits)
    return losses, gradient


def _softmax_loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the loss of each target, float32 [C], and its gradient with respect to its logits [C, V], in their dtype.

    The gradient is softmax(logits), less 1 at the target. One float32 tensor [C, V] is changed in place.
    """
    values = logits.to(torch.float32, copy=True)
    values -= values.amax(dim=-1, keepdim=True)
    losses = -values.gather(1, targets[:, None])
    total = values.exp_().sum(dim=-1, keepdim=True)
    losses += total.log()
    values /= total
    gradient = values.to(logits.dtype)
    return losses[:, 0], gradient.scatter_(1, targets[:, None], torch.expm1(-losses).to(logits.dtype))


def _losses_and_aux_loss(
    model_forward: Any, head: Any, wanted: _Wanted, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, Any]:
    """Compute the losses [S], and the auxiliary loss [] of the routers, in one call of the model's own forward.

    The head is called once, for the losses. FSDP shards it again when the backward pass of one call has ended, and with
    it the norm before it, whose backward pass comes later.
    """
    outputs: list[torch.Tensor] = []

    def ask_for_losses(module: Any, inputs: Any, given: Any) -> Any:
        asked = {"targets": wanted.targets, "target_values": wanted.target_values}
        return (wanted.states(inputs[0]),), given | asked

    hooks = [
        head.register_forward_pre_hook(ask_for_losses, with_kwargs=True),
        head.register_forward_hook(lambda module, inputs, output: outputs.append(output)),
    ]
    try:
        own = model_forward(*args, use_cache=False, output_router_logits=True, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs[0], own.aux_loss


@contextmanager
def _routers_see(model: Any, token_mask: torch.Tensor | None) -> Iterator[None]:
    """Let a family's auxiliary loss leave out padding in a packed call, which has no ``attention_mask`` to say it."""
    module = family_of(model)
    name = "load_balancing_loss_func"
    plain = getattr(module, name, None)
    if token_mask is None or plain is None:
        yield
        return

    def masked(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(plain).bind(*args, **kwargs)
        call.arguments["attention_mask"] = token_mask
        return plain(*call.args, **call.kwargs)

    setattr(module, name, masked)
    try:
        yield
    finally:
        setattr(module, name, plain)


def _features(decoder: Any, inputs: dict[str, Any]) -> list[Any]:
    """What the encoders make of inputs for images, and of those for audio, whose names have "feature"."""
    heard = {name: value for name, value in inputs.items() if "feature" in name}
    features: list[Any] = []
    if images := {name: value for name, value in inputs.items() if name not in heard}:
        seen = decoder.get_image_features(**images, return_dict=True)
        features += [seen.pooler_output, getattr(seen, "deepstack_features", None)]
    if heard and hasattr(decoder, "get_audio_features"):
        features.append(decoder.get_audio_features(**heard, return_dict=True).pooler_output)
    elif heard:  # Qwen2-Audio has no function for it
        features.append(decoder.multi_modal_projector(decoder.audio_tower(**heard).last_hidden_state))
    return features


# In a forward that ``install_loss_head`` reproduces, the right sides of `logits =` and `hidden_states =` match these.
_KNOWN_LOGITS = re.compile(
    r"""(self\.(?P<head>\w+)\(hidden_states(\[:,\ slice_indices,\ :\])?(\.to\([\w.=]+\))?\)
    (\.float\(\)|\.contiguous\(\))?|logits(\.float\(\))?)(\ (?P<operator>[*/])\ (?P<name>[\w.]+))?$
    |torch\.(?P<tanh>tanh)\(logits\)$|nn\.functional\.tanh\(logits\ /\ (?P<cap>\w+)\)\ \*\ (?P=cap)$|logits,""",
    re.VERBOSE,
)
_KNOWN_HIDDEN = re.compile(
    r"slice_logits_to_keep\(hidden_states, logits_to_keep\)$"
    r"|\w*outputs(\.last_hidden_state|\[0\])$|\w*outputs\.hidden_states,"
)


def _logit_transform(model: Any) -> Any:
    """The function that the model's own forward applies to the head's output; None if the forward does more than that.

    It is read from the source code, so that a key of the config counts only as the forward uses it: to cap the logits
    (Gemma 2), to multiply (Cohere) or divide them (Granite), or not at all.
    """
    try:
        source = inspect.getsource(type(model).forward)
    except (OSError, TypeError):
        return None
    values = _assigned(source, "logits")
    steps = [step for step in map(_KNOWN_LOGITS.match, values) if step]
    hidden_is_known = all(_KNOWN_HIDDEN.match(value) for value in _assigned(source, "hidden_states"))
    if not steps or len(steps) < len(values) or not hidden_is_known:
        return None
    operators, names = "", []
    for step in steps:
        if step["head"] and getattr(model, step["head"], None) is not model.get_output_embeddings():
            return None
        if step["cap"]:
            operators += "/t*"
            names += [step["cap"]] * 2
        elif step["operator"] or step["tanh"]:
            operators += step["operator"] or "t"
            names += [step["name"]] if step["name"] else []
    try:
        numbers = [_attribute(model, source, name) for name in names]
    except AttributeError:
        return None
    if all(number is None for number in numbers):  # such a step stands under `if self.config.... is not None`
        return _unchanged
    if not all(isinstance(number, int | float) for number in numbers):
        return None
    if operators == "/t*" and names[0] == names[-1]:
        cap = numbers[0]
        return lambda logits: torch.tanh(logits / cap) * cap
    if "t" in operators:
        return None
    factor = math.prod(n if o == "*" else 1.0 / n for o, n in zip(operators, numbers, strict=True))
    return _unchanged if factor == 1.0 else lambda logits: logits * factor


def _attribute(model: Any, source: str, name: str) -> Any:
    """The value of ``self.a.b`` in the source code of the model's forward, or of a variable that is assigned it once.

    Raises ``AttributeError`` if it is something else.
    """
    path = name
    if not name.startswith("self."):
        values = [*_assigned(source, name), *re.findall(rf"if \({name} := (\S+)\) is not None:", source)]
        path = values[0] if len(values) == 1 else ""
    value = model
    for part in path.removeprefix("self.").split("."):
        value = value.get_text_config() if part == "get_text_config()" else getattr(value, part)
    return value


def _assigned(source: str, name: str) -> list[str]:
    """The right sides of the lines of Python code that assign to ``name``, without comments."""
    values = re.findall(rf"^\s*{name}\s*=(?!=)\s*(.+)$", source, re.MULTILINE)
    return [value.split("#")[0].strip() for value in values]


def _unchanged(logits: torch.Tensor) -> torch.Tensor:
    return logits
