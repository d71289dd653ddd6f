"""The memory of a run by formulas: of a GPU at its peak, by component. ``kit.memory.host`` has that of the host.

The peak of a step is the largest of a few moments, each a sum of what is there then: when the loss head computes
logits and their gradients, in the backward pass of a layer, and when the embedding gets its gradient. The components
have the names by which a simulation measures them, so that both can be compared line by line.

Sources: what autograd saves (``kit.memory.activations``), the dtypes and chunks of ``kit.model``, and what FSDP2
gathers and reduces in a simulation of the kit's own step (benchmarks/simulation). What no simulation shows is
assumed (``CONTEXT_BYTES`` and so on).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kit.memory.activations import (
    beside_tiles,
    feed_forward,
    held,
    held_by_all,
    in_frozen_layer,
    in_tile,
    is_autocast,
    kept,
    masks,
    passing,
    stream,
)
from kit.memory.host import disk_bytes, host_bytes
from kit.memory.sizes import (
    GRADIENT_BYTES,
    MXFP4_BYTES,
    NF4_PACKED_BYTES,
    NF4_TABLE_BYTES,
    ORTHOGONALISED_BYTES,
    UPDATED_BYTES,
    UPDATED_TOGETHER,
    WEIGHT_BYTES,
)
from kit.memory.workload import Workload
from kit.model.layers.chunks import chunk_size
from kit.model.layers.tiled_mlp import TILE
from kit.strategy.strategies import DDP

# What tensors take of a GPU. A simulation sees these, and not the rest.
TENSORS = (
    "trainable weights",
    "frozen weights",
    "4-bit weights",
    "buffers",
    "teacher",
    "gradients",
    "optimiser",
    "unsharded weights",
    "dequantised weights",
    "logits",
    "activations",
)
TRAINABLE, FROZEN, FOUR_BIT, _, TEACHER, GRADIENTS, OPTIMISER, GATHERED, DEQUANTISED, LOGITS, ACTIVATIONS = TENSORS
CONTEXT, NCCL, FRAGMENTATION = "CUDA context", "NCCL buffers", "fragmentation"
EXPERTS_TOGETHER = 64 * 2**20  # ``MAX_BYTES`` of kit.model.experts.packed, which needs torch
# Assumed: what CUDA, its kernels and the workspace of its matrix library take; the buffers of NCCL's channels for each
# group; and fragmentation, as a fraction of transient allocations.
CONTEXT_BYTES, NCCL_BYTES, FRAGMENTATION_SHARE = int(0.6 * 2**30), int(0.4 * 2**30), 0.05


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory that a run needs, in bytes."""

    components: dict[str, int]  # of one GPU at its peak: those of ``TENSORS`` that are above 0, and what is assumed
    moment: str  # of the peak: see ``_moments``
    host: dict[str, int] = field(default_factory=dict)  # of one machine's memory, by what takes it
    disk: dict[str, int] = field(default_factory=dict)  # by what takes it

    @property
    def tensors(self) -> int:
        """Bytes of all tensors on one GPU at the peak: what a simulation measures."""
        return sum(size for name, size in self.components.items() if name in TENSORS)

    @property
    def peak(self) -> int:
        """Bytes that one GPU must have."""
        return sum(self.components.values())


def predict(workload: Workload) -> Memory:
    """Predict the memory of ``workload``."""
    held = _held(workload) + _beside_tower(workload) + Counter({ACTIVATIONS: workload.tokens * masks(workload)})
    moments = [(name, held + parts) for name, parts in _moments(workload)]
    moments += [("teacher's pass", parts) for parts in _teacher_alone(workload)]
    moment, peak = max(moments, key=lambda entry: entry[1].total())
    components = {name: int(peak[name]) for name in TENSORS if peak[name] > 0}
    components[CONTEXT] = CONTEXT_BYTES
    if workload.num_gpus > 1:
        # Hybrid sharding has two groups: that of a copy, and that of the GPUs with the same shard.
        components[NCCL] = NCCL_BYTES * (2 if 1 < workload.num_shards < workload.num_gpus else 1)
    components[FRAGMENTATION] = int(FRAGMENTATION_SHARE * (peak - held).total())
    # Of an offloaded run, what is divided is in the host's memory.
    share = sum(_frozen(workload, workload.num_shards).values()) + sum(_trained(workload).values())
    whole = sum(_frozen(workload, shards=1).values())
    whole += WEIGHT_BYTES * workload.trainable_parameters if workload.method == "full" else 0
    if teacher := workload.as_teacher:  # one is loaded after the other
        whole = max(whole, sum(_frozen(teacher, shards=1).values()))
    host = host_bytes(workload, share, int(whole))
    return Memory(components=components, moment=moment, host=host, disk=disk_bytes(workload))


# --- persistent allocations


def _frozen(workload: Workload, shards: int) -> dict[str, float]:
    """Bytes of the frozen weights on one GPU. The tables of 4-bit weights are not sharded."""
    if workload.method == "full":
        return {FROZEN: workload.compute_bytes * workload.frozen_in_tower / shards}
    shape = workload.shape
    four_bit = shape.matrices if workload.method == "qlora" else 0
    if four_bit and shape.tower:
        four_bit += shape.tower.linear_weights
    in_mxfp4 = shape.in_mxfp4 if four_bit else 0  # scales included, it is sharded
    in_nf4 = (four_bit - in_mxfp4) * (NF4_PACKED_BYTES / shards + NF4_TABLE_BYTES)
    return {
        FROZEN: workload.compute_bytes * (shape.num_parameters - four_bit) / shards,
        FOUR_BIT: in_nf4 + in_mxfp4 * MXFP4_BYTES / shards,
    }


def _trained(workload: Workload) -> dict[str, float]:
    """Bytes of the trainable weights and their optimiser on one GPU; of offloaded ones, of one GPU's share."""
    weights = workload.weight_bytes * workload.trainable_parameters
    return {TRAINABLE: weights / workload.num_shards, OPTIMISER: workload.moment_bytes / workload.num_shards}


def _held(workload: Workload) -> "Counter[str]":
    """Bytes that a GPU holds in every moment of a step, from the second step on."""
    beside = Counter({TEACHER: 0 if workload.teacher_top_k else _teacher(workload)})
    if workload.strategy.offloads:
        return beside + Counter({FOUR_BIT: _frozen(workload, workload.num_shards).get(FOUR_BIT, 0)})
    held = beside + Counter(_trained(workload))
    held.update(_frozen(workload, workload.num_shards))
    if _accumulates(workload):
        held[GRADIENTS] = int(_gradients(workload))
    if workload.strategy == DDP and workload.pure_bf16:  # its buckets, in which these gradients do not lie
        held[GRADIENTS] += 2 * workload.trainable_parameters
    return held


def _teacher(workload: Workload) -> float:
    """Bytes of the teacher: its weights, its head once more where they are sharded, its states of a step's targets."""
    model = workload.as_teacher
    if model is None:
        return 0
    of_layers = _frozen(model, model.num_shards)
    weights = of_layers[FOUR_BIT] if workload.strategy.offloads else sum(of_layers.values())
    head = model.compute_bytes * model.shape.embedding_parameters if model.sharded else 0
    # Of whole rows, also where GPUs share them: each has the states of all targets.
    states = model.compute_bytes * model.micro_batches * model.rows * model.sample_tokens * model.shape.hidden_size
    return weights + head + states


def _teacher_pass(teacher: Workload) -> Iterator["Counter[str]"]:
    """Bytes in a teacher's pass, of which autograd keeps nothing: in an MLP, and in the all-gather of its head.

    Args:
        teacher: ``Workload.as_teacher``.
    """
    gathered = 2 * _gathered_layer(teacher) if teacher.sharded else 0
    passing_by = 4 * teacher.compute_bytes * teacher.shape.intermediate_size + 2 * stream(teacher)
    yield Counter({ACTIVATIONS: teacher.tokens * passing_by, GATHERED: gathered})
    if teacher.sharded:
        yield Counter({GATHERED: _gathering(teacher)[GATHERED]})


def _teacher_alone(workload: Workload) -> Iterator["Counter[str]"]:
    """Bytes of a GPU in the passes of offline distillation, before the student is loaded."""
    teacher = workload.as_teacher
    if teacher is None or not workload.teacher_top_k:
        return
    there = Counter({TEACHER: _teacher(replace(workload, micro_batches=1))})
    for parts in _teacher_pass(teacher):
        yield there + parts
    # Logits in float32, divided, without the most probable ones, and as a sum exponentiates.
    chunk = min(teacher.tokens, chunk_size(teacher.shape.vocab_size, 1, head_trains=False))
    yield there + Counter({LOGITS: 16 * teacher.shape.vocab_size * chunk})


def _gradients(workload: Workload) -> float:
    """Bytes of all gradients of one GPU; of hybrid sharding also those that are not yet added to other copies'."""
    if workload.strategy.offloads:
        return 0
    unreduced = workload.sharded and workload.sync_each_batch is False
    shards = 1 if unreduced else workload.num_shards
    size = GRADIENT_BYTES if unreduced else workload.gradient_bytes
    return size * workload.trainable_parameters / shards


def _of_text(workload: Workload, gradients: float) -> float:
    """The part of ``gradients`` that is there before the backward pass of an encoder."""
    return gradients * (1 - workload.trained_in_tower / max(1, workload.trainable_parameters))


def _accumulates(workload: Workload) -> bool:
    """Whether gradients exist when a micro-batch begins. Those in DDP's buckets always do."""
    return workload.micro_batches > 1 or (workload.strategy == DDP and not workload.pure_bf16)


# --- transient allocations


def _beside_tower(workload: Workload) -> "Counter[str]":
    """Bytes of a vision tower that are there all the time, without its layers.

    These are the pixels of a micro-batch, in float32, and of the next one, which is copied meanwhile; and of a sharded
    model what is in none of its layers, which stays unsharded.
    """
    tower = workload.shape.tower
    if tower is None:
        return Counter()
    pixels = 4 * tower.values_per_patch * workload.patches * min(2, workload.micro_batches)
    around = workload.compute_bytes * tower.around_layers if workload.sharded else 0
    return Counter({ACTIVATIONS: pixels, GATHERED: around})


def _moments(workload: Workload) -> Iterator[tuple[str, "Counter[str]"]]:
    """Bytes in addition to ``_held``, in each moment in which a step may have its peak."""
    tower = workload.of_tower
    if tower is None:
        yield from _moments_of_text(workload)
        return
    # What the layers of a tower that trains keep is there until all those of the text have had their backward pass.
    states = tower.tokens * (held_by_all(tower) + masks(tower)) if tower.method == "full" else 0
    for name, parts in _moments_of_text(workload):
        is_between = name in ("all-gather", "loss head", "backward pass")
        yield name, parts + Counter({ACTIVATIONS: states if is_between else 0})
    yield "vision encoder", Counter({ACTIVATIONS: states + tower.tokens * (in_frozen_layer(tower) + masks(tower))})
    if states:
        own = tower.tokens * (kept(tower) + passing(tower))
        gradients = 0 if _accumulates(workload) else _gradients(workload)
        yield (
            "vision encoder's backward pass",
            Counter({ACTIVATIONS: states + own, GRADIENTS: _of_text(workload, gradients)}),
        )
        yield "vision encoder's backward pass", Counter({ACTIVATIONS: own, GRADIENTS: gradients})


def _moments_of_text(workload: Workload) -> Iterator[tuple[str, "Counter[str]"]]:
    """The same of the language model."""
    shape = workload.shape
    to_come = Counter() if _accumulates(workload) else Counter({GRADIENTS: _gradients(workload)})
    if workload.sharded:
        yield "all-gather", _gathering(workload)
        if shape.experts:  # layers so large that two, and the buffer of one, are more than what a layer computes
            states = workload.tokens * (held_by_all(workload) - held(workload))
            yield "all-gather", Counter({GATHERED: 3 * _gathered_layer(workload), ACTIVATIONS: states})
        if workload.passes and not shape.tied:
            yield "all-gather after a no-grad pass", _gathering_again(workload)
    if (teacher := workload.as_teacher) and not workload.teacher_top_k:
        cleared = {} if workload.strategy == DDP else {GRADIENTS: -_held(workload)[GRADIENTS]}
        for parts in _teacher_pass(teacher):
            yield "teacher", parts + Counter(cleared)
    if workload.generated_rows:
        for parts in _generation(workload):
            yield "generation", parts
    for parts in _loss_head(workload):
        yield "loss head", parts
    for parts in _backward(workload, _of_text(workload, to_come[GRADIENTS])):
        yield "backward pass", parts
    if workload.method == "full":
        yield "embedding's gradient", _embedding(workload, to_come[GRADIENTS])
    if workload.optim == "adamw_torch" and not workload.strategy.offloads:
        # On a GPU torch computes the roots of all second moments before it updates the first weight.
        to_come = to_come + Counter({ACTIVATIONS: WEIGHT_BYTES * workload.trainable_parameters // workload.num_shards})
    if workload.pure_bf16 and not workload.strategy.offloads:
        largest = max(shape.embedding_parameters, shape.hidden_size * shape.intermediate_size) // workload.num_shards
        to_come = to_come + Counter({ACTIVATIONS: UPDATED_BYTES * min(UPDATED_TOGETHER, largest)})
    if workload.optim == "muon" and not workload.strategy.offloads and workload.method == "full":
        largest = max(linear.num_weights for linear in shape.linears)
        to_come = to_come + Counter({ACTIVATIONS: ORTHOGONALISED_BYTES * largest})
    yield "optimiser step", to_come


def chunk_tokens(workload: Workload) -> int:
    """Tokens of a chunk of the loss head, as ``install_loss_head`` chooses it."""
    sizes = workload.shape.vocab_size, workload.shape.hidden_size
    return min(chunk_size(*sizes, workload.method == "full", workload.device_memory), workload.tokens)


def _gathered_layer(workload: Workload) -> float:
    """Bytes of one layer after FSDP2's all-gather."""
    shape, plain = workload.shape, workload.compute_bytes
    adapters = plain * workload.adapter_parameters / shape.num_layers
    if workload.method == "qlora":
        return 0.5 * shape.layer_matrices + plain * shape.layer_vectors + adapters
    return plain * shape.layer_parameters + adapters


def cache_bytes(workload: Workload) -> int:
    """Bytes of the KV cache of one generation batch, prompts included."""
    per_token = 2 * workload.compute_bytes * sum(number * kind.kv_size for number, kind in workload.shape.kinds)
    return workload.generated_rows * workload.length * per_token


def _generation(workload: Workload) -> Iterator["Counter[str]"]:
    """While the prompts pass a layer's feed-forward part, all at once, and while a token is drawn, in float64.

    There are keys and values, and all weights: gathered, or as autocast casts them once for all tokens.
    """
    shape, rows = workload.shape, workload.generated_rows
    weights = workload.compute_bytes * shape.num_parameters
    there: dict[str, float] = {GATHERED: weights if workload.sharded else 0}
    there[GRADIENTS] = 0 if workload.strategy == DDP else -_held(workload)[GRADIENTS]
    cast = weights if is_autocast(workload) else 0
    cache, prompt = cache_bytes(workload), max(1, workload.length - workload.new_tokens)
    passing_by = rows * prompt * (4 * workload.compute_bytes * shape.intermediate_size + 2 * stream(workload))
    yield Counter({**there, ACTIVATIONS: cast + cache * prompt // workload.length + passing_by})
    yield Counter({**there, ACTIVATIONS: cast + cache, LOGITS: (4 + 8 + 8) * rows * shape.vocab_size})


def _gathering(workload: Workload) -> "Counter[str]":
    """While the head is all-gathered: what arrived, and the tensors into which it is copied.

    A head that is tied to the embedding is gathered before the first layer, any other after the last.
    """
    shape, layer = workload.shape, _gathered_layer(workload)
    head = workload.compute_bytes * shape.embedding_parameters
    if shape.tied:
        return Counter({GATHERED: 2 * (head + layer)})
    states = workload.tokens * held_by_all(workload)
    return Counter({ACTIVATIONS: states, GATHERED: 2 * head + layer})


def _gathering_again(workload: Workload) -> "Counter[str]":
    """While the embedding is all-gathered for a forward pass after a no-grad pass, of which the head is still there.

    It comes before all backward passes of a step, so there are no gradients.
    """
    head = workload.compute_bytes * workload.shape.embedding_parameters
    return Counter({GATHERED: 3 * head, GRADIENTS: -_held(workload)[GRADIENTS]})


def _loss_head(workload: Workload) -> Iterator["Counter[str]"]:
    """While logits are computed, and while the gradient of the head is."""
    shape, tokens = workload.shape, workload.tokens
    plain, autocast = workload.compute_bytes, is_autocast(workload)
    head = plain * shape.embedding_parameters
    logits = shape.vocab_size * chunk_tokens(workload)
    # The last layer's output, the last norm (in tiles it keeps nothing else), and the states of supervised tokens.
    last = (16 if autocast else (3 if workload.tiled_mlp else 5) * plain) * shape.hidden_size
    kept_bytes = tokens * (held_by_all(workload) + last)
    copies = 0.0  # of the adapters' float32 weights in bf16, which autograd keeps for the backward pass
    if workload.is_half and not workload.sharded and not workload.gradient_checkpointing and not autocast:
        copies = 2 * workload.adapter_parameters
    if not workload.has_lm_head:
        yield Counter({ACTIVATIONS: kept_bytes + copies, GATHERED: head if workload.sharded else 0})
        return
    if workload.loss != "chunks":
        # Logits in bf16, in float32, their log-softmax and its gradient; or, in eight chunks, logits in bf16 that give
        # way to their gradients, and one chunk in float32.
        share = 14 if workload.loss == "whole" else 2.5
        yield Counter({ACTIVATIONS: kept_bytes + copies, LOGITS: share * shape.vocab_size * tokens})
        return
    gathered = 0.0
    if workload.sharded:  # and the buffer of what was gathered last: the head, or the last layer where it is tied
        gathered = head + (_gathered_layer(workload) if shape.tied else head)
    in_float32 = 0 if workload.fuses else 4  # compiled, softmax is not written in float32
    if workload.method != "full":
        # Caps: logits in float32, divided, through tanh, multiplied, and the gradient.
        per_logit = max(plain + in_float32 + plain, workload.logit_bytes) + (16 - plain if shape.caps_logits else 0)
        yield Counter({ACTIVATIONS: kept_bytes + copies, LOGITS: per_logit * logits, GATHERED: gathered})
        return
    forward = copies + (head if autocast else 0)
    yield Counter(
        {ACTIVATIONS: kept_bytes + forward, LOGITS: max(2 * plain, 2 * in_float32) * logits, GATHERED: gathered}
    )
    # Backward: the sum over chunks so far in float32, the weights as autocast has cast them, and this chunk's part.
    gathered = head + _gathered_layer(workload) if workload.sharded else 0
    logits_left = 2 * logits if autocast else 0
    sums = 4 * shape.embedding_parameters + (head if autocast else 0)
    yield Counter({ACTIVATIONS: kept_bytes + copies + sums + head, LOGITS: logits_left, GATHERED: gathered})
    yield Counter(
        {
            ACTIVATIONS: kept_bytes + copies + sums,
            LOGITS: max(2 * plain + 2 * in_float32, workload.logit_bytes) * logits,
            GATHERED: gathered,
        }
    )


def _backward(workload: Workload, to_come: float) -> Iterator["Counter[str]"]:
    """In the backward pass of the last layer, with the states of all layers, and of the first, with all gradients.

    Args:
        to_come: bytes of the gradients that are not in ``_held``.
    """
    shape, tokens = workload.shape, workload.tokens
    experts = shape.experts.num_weights if shape.experts else 0
    matrix = 0 if experts else shape.hidden_size * shape.intermediate_size
    dequantised = min(workload.compute_bytes * experts, EXPERTS_TOGETHER) if experts else 2 * matrix
    if shape.in_mxfp4:  # transformers' function indexes a table with integers of 4 and 8 bytes
        dequantised *= 5
    own = tokens * (kept(workload) + passing(workload))
    while_dequantised = shape.intermediate_size + shape.hidden_size if experts else 5 * shape.hidden_size
    dequantising = tokens * (kept(workload) + 2 * while_dequantised)
    if workload.tiled_mlp:
        in_tiles = min(tokens, TILE) * in_tile(workload)
        own = tokens * beside_tiles(workload) + in_tiles
        dequantising = own - min(tokens, TILE) * workload.compute_bytes * shape.intermediate_size
    full = workload.method == "full"
    gathered = 2 * _gathered_layer(workload) if workload.sharded else 0.0
    if workload.sharded and shape.tied:  # it is needed again, as the embedding
        gathered += workload.compute_bytes * shape.embedding_parameters
    # FSDP reduces in float32. The input of the last reduction stays until the next one.
    layer_gradients = 4 * (shape.layer_parameters if full else workload.adapter_parameters / shape.num_layers)
    head = shape.embedding_parameters if full and workload.has_lm_head else 0
    for is_last in (True, False):
        extra, gradients, reducing = 0.0, 0.0, 0.0
        if workload.sharded:
            reducing = 4 * head if is_last and not shape.tied else layer_gradients
            extra = 2 * head if shape.tied else 0.0  # the head's gradient waits for that of the embedding
            gradients = reducing + (4 * matrix if full else 0)
        elif is_autocast(workload):
            # Weights as autocast has cast them: with checkpointing those of the layer, else the one that is cast again.
            extra = 2 * (shape.layer_linear_weights if workload.gradient_checkpointing else matrix)
            extra += 6 * matrix if _accumulates(workload) else 0
            extra += 4 * head if shape.tied else 0.0
        # FSDP has gathered the layer before already, so the second layer counts rather than the first. With
        # checkpointing the layer's own input is there too; with autocast it is among what the layer keeps.
        before = tokens * (held_by_all(workload) - held(workload) if is_last else held(workload))
        if workload.gradient_checkpointing and not is_autocast(workload):
            before += tokens * stream(workload)
        # Of the first layer, all but the embedding's gradient is there; of the last, only the head's.
        share = 4 * head / workload.num_shards
        later = 2 * layer_gradients / workload.num_shards if workload.sharded else 0
        gradients += (0 if shape.tied else min(to_come, share)) if is_last else max(0, to_come - share - later)
        yield Counter({ACTIVATIONS: own + before + extra, GRADIENTS: gradients, GATHERED: gathered})
        if experts and full:  # their gradients are there, and what they kept is not
            own_after = own - tokens * feed_forward(workload)
            gradients_after = gradients + workload.compute_bytes * experts
            yield Counter({ACTIVATIONS: own_after + before + extra, GRADIENTS: gradients_after, GATHERED: gathered})
        if workload.method == "qlora":
            yield Counter(
                {
                    ACTIVATIONS: dequantising + before,
                    DEQUANTISED: dequantised,
                    GRADIENTS: gradients,
                    GATHERED: gathered,
                }
            )


def _embedding(workload: Workload, to_come: float) -> "Counter[str]":
    """While the embedding gets its gradient [V, h], which is not sparse."""
    shape = workload.shape
    table = shape.embedding_parameters
    if workload.sharded:
        layer = _gathered_layer(workload)
        if shape.tied and workload.has_lm_head:  # the head's part, the embedding's, and their sum
            others = max(0, to_come - 4 * table / workload.num_shards)
            return Counter({ACTIVATIONS: 6 * table, GATHERED: 2 * table, GRADIENTS: others + 2 * layer})
        return Counter({ACTIVATIONS: 2 * table + layer, GRADIENTS: to_come + 4 * table})
    num_tables = (2 if shape.tied and workload.has_lm_head else 0) + (1 if _accumulates(workload) else 0)
    return Counter({ACTIVATIONS: workload.weight_bytes * table * num_tables, GRADIENTS: to_come})
