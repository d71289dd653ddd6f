"""Activation memory: bytes per token that one decoder layer keeps for the backward pass, and transient ones.

From the tensors that autograd saves in transformers' Llama: h is the hidden size, q and k the widths of all queries and
of all keys, f that of the feed-forward part, H the number of heads, r the rank of an adapter. The attention kernel
saves queries, keys, values, its output and 4 bytes a head; RMSNorm computes in float32. In float32, in fp16 (of GPUs
without bf16), and in eager attention, it saves keys and values once for each head of the queries. Eager attention saves
also, of each score, the float32 result of softmax, its copy in bf16, and the result of tanh where scores are capped: 6
or 8 bytes for each head and pair of tokens, in place of the 4 bytes a head.

========================================  ========================================================
weights                                   bytes per token
========================================  ========================================================
trained, gathered in bf16 (FSDP)          16h + 4q + 4k + 8f + 4H + 8
trained in float32, autocast to bf16      20h + 4q + 4k + 8f + 4H + 8; the stream between layers is float32
trained in float32, no autocast           24h + 16q + 16f + 4H + 8
frozen in bf16, adapters                  12h + 4q + 4k + 8f + 2r for each adapted module + 4H + 8
========================================  ========================================================

Compiled layers keep, of what is cheap, only what the rest can be computed from again: the inputs of the norms, of the
feed-forward part its two large tensors, and of norms of heads their inputs and factors.

With gradient checkpointing a layer keeps its input, h, until its backward pass computes all that again. The selective
one keeps also the results of its linear modules and of attention, 2h + 2q + 2k + 2f values and 4H bytes. With
``activation_offload`` the input is in host memory.
"""

import math
from dataclasses import replace

from kit.memory.workload import Workload
from kit.model.layers.checkpointing import is_wide

FRAGMENT = 8  # bytes per token of the norms' two factors


def kept(workload: Workload) -> int:
    """Bytes per token that one layer keeps for its backward pass."""
    shape, plain = workload.shape, workload.compute_bytes
    h, q, k, f = shape.hidden_size, shape.query_size, shape.kv_size, shape.intermediate_size
    attention, adapters = _attention(workload), _adapters(workload, in_mlp=True) + _adapters(workload, in_mlp=False)
    if workload.fuses:
        heads = plain * (q + k) + 4 * (shape.num_heads + shape.num_kv_heads) if shape.norm_of_heads else 0
        inputs_of_norms = stream(workload) + (shape.num_norms - 1) * plain * h
        return inputs_of_norms + attention + plain * 2 * f + FRAGMENT + heads + adapters
    common = attention + feed_forward(workload) + FRAGMENT
    if workload.method == "full":
        if not workload.is_half:
            norm, casts = 12 * h, 0
        elif workload.sharded or workload.pure_bf16:
            norm, casts = 8 * h, 0
        else:  # q, k and v share one cast of their input, gate and up another
            norm, casts = 8 * h, 4 * h
        if shape.layer_norm:  # it is one function, which keeps its input
            norm -= 4 * h
        bytes_ = shape.num_norms * norm + casts + common
    else:
        norm = 4 * h + plain * h if workload.is_half else 8 * h
        bytes_ = shape.num_norms * norm + common + adapters
    if shape.norm_of_heads:  # a float32 copy of q and k, and of a trained norm also its result
        bytes_ += (6 if workload.method == "full" else 4) * (q + k)
    return bytes_


def feed_forward(workload: Workload) -> int:
    """Bytes per token that the feed-forward part keeps, without its adapters."""
    shape, plain = workload.shape, workload.compute_bytes
    f, experts = shape.intermediate_size, shape.experts
    if experts is None:
        return plain * (4 if shape.gated else 2) * f
    # Of all experts that a token reaches: the gate's inputs and result, and what the router's probabilities weigh.
    values = (6 if experts.has_bias else 3) * f + experts.per_token * shape.hidden_size
    of_router = 4 * experts.number + 32 * experts.per_token
    if workload.method == "full":  # inputs of both products
        values += f + experts.per_token * shape.hidden_size
    else:  # the input of this part is not kept, if no adapter reads it
        values -= shape.hidden_size
    # Autocast does not reach grouped products: they have the dtype of the weights.
    return (4 if is_autocast(workload) else plain) * values + of_router


def _attention(workload: Workload) -> int:
    """Bytes per token that attention keeps: queries, keys, values, its output, and what its kernel keeps of scores."""
    shape = workload.shape
    has_no_kernel = workload.eager or workload.mixed_precision != "bf16"
    is_repeated = has_no_kernel and shape.num_kv_heads > 1  # one head is, without a copy
    keys = shape.query_size if is_repeated else exchanged_kv_size(workload)
    of_scores = _scores(workload) if workload.eager else 4 * shape.num_heads
    # With sequence parallelism attention's output is kept before the all-to-all, and its result after it.
    outputs = 1 if workload.sequence_parallel_size == 1 else 2
    # The tensor of which the values are a view stays whole, and each image's result is there once more.
    views = 3 * shape.query_size if shape.rotates_views else 0
    of_family = workload.compute_bytes * shape.kept_values + 4 * shape.kept_floats
    if shape.has_mask and is_autocast(workload):  # which casts it in each layer
        of_family += workload.compute_bytes * workload.width
    return workload.compute_bytes * ((1 + outputs) * shape.query_size + 2 * keys + views) + of_scores + of_family


def exchanged_kv_size(workload: Workload) -> int:
    """Return the width of all keys, with those that sequence parallelism repeats (``SequenceGroup.whole_rows``)."""
    num_heads = workload.shape.num_kv_heads
    return workload.shape.kv_size // num_heads * math.lcm(num_heads, workload.sequence_parallel_size)


def _adapters(workload: Workload, in_mlp: bool) -> int:
    """Bytes per token that the adapters of the MLP's modules keep, or those of attention's."""
    if workload.method == "full":
        return 0
    plain = workload.compute_bytes
    adapted = [each for each in workload.shape.adapted(workload.lora_targets) if each.is_in_mlp == in_mlp]
    dropped = sum((plain + 1) * each.inputs for each in adapted) if workload.lora_dropout else 0
    of_experts = 0
    if in_mlp and (experts := workload.shape.experts):  # a sorted copy of the input, or what dropout makes of it
        of_input = plain + 1 if workload.lora_dropout else plain
        products = workload.shape.adapted_products(workload.lora_targets)
        of_experts = experts.per_token * sum(of_input * each.inputs + plain * workload.lora_r for each in products)
    return plain * workload.lora_r * len(adapted) + dropped + of_experts


def beside_tiles(workload: Workload) -> int:
    """Bytes per token of one layer, with ``tiled_mlp``, while the gradients of a tile of its MLP are computed.

    Attention keeps what it does without tiles, and its input. Norms and MLP keep their inputs, and two gradients of the
    stream are there. Norms of heads are not tiled, and compute in float32.
    """
    shape = workload.shape
    own = stream(workload) if is_autocast(workload) else 0  # else it is counted with what all layers hold
    of_heads = 8 * (shape.query_size + shape.kv_size) if shape.norm_of_heads else 0
    inputs = workload.compute_bytes * shape.hidden_size + 4 * stream(workload)
    return own + inputs + _attention(workload) + _adapters(workload, in_mlp=False) + of_heads


def in_tile(workload: Workload) -> int:
    """Bytes per token of a tile of an MLP, kept and passing, while its gradients are computed."""
    shape, plain = workload.shape, workload.compute_bytes
    return plain * (5 * shape.intermediate_size + 3 * shape.hidden_size) + _adapters(workload, in_mlp=True)


def in_frozen_layer(workload: Workload) -> int:
    """Bytes per patch that pass through a layer of a tower from which nothing is kept."""
    shape, plain = workload.shape, workload.compute_bytes
    h, f = shape.hidden_size, shape.intermediate_size
    rotating = 2 * plain * h + 16 * h if shape.rotates_views else 0  # of queries and keys, in float32
    return plain * 2 * h + max(plain * 4 * h + rotating, plain * (h + (4 if shape.gated else 2) * f))


def held(workload: Workload) -> int:
    """Bytes per token that one layer holds until its backward pass begins, with the checkpointing of ``workload``."""
    if not workload.gradient_checkpointing:
        return kept(workload)
    own = stream(workload) - offloaded(workload)
    if workload.gradient_checkpointing is True:
        return own
    shape, plain = workload.shape, workload.compute_bytes
    values = sum(each.outputs for each in shape.linears if is_wide(each.inputs, each.outputs))
    if shape.experts:
        values += shape.experts.per_token * sum(each.outputs for each in shape.experts.products)
    if workload.method != "full":  # of a high rank; its part is added to the module's result in place
        adapted = list(shape.adapted(workload.lora_targets))
        values += sum(workload.lora_r for each in adapted if is_wide(each.inputs, workload.lora_r))
    attention = 0 if workload.eager else plain * shape.query_size + 4 * shape.num_heads
    return own + plain * values + attention


def held_by_all(workload: Workload) -> int:
    """Bytes per token that all layers hold, each until its backward pass begins."""
    return sum(number * held(replace(workload, shape=kind)) for number, kind in workload.shape.kinds)


def kept_by_all(workload: Workload) -> int:
    """Bytes per token that all layers keep, if nothing is checkpointed."""
    return sum(number * kept(replace(workload, shape=kind)) for number, kind in workload.shape.kinds)


def offloaded(workload: Workload) -> int:
    """Bytes per token of the input that one layer keeps in host memory, see ``kit.model.layers.activation_offload``."""
    return stream(workload) if workload.activation_offload and workload.gradient_checkpointing else 0


def _scores(workload: Workload) -> int:
    """Bytes per token that eager attention keeps of its scores [H, T, T]."""
    plain = workload.compute_bytes
    if workload.fuses or workload.shape.has_sinks:  # with sinks, softmax computes in the dtype of scores
        return workload.shape.num_heads * workload.width * plain
    copies = (plain if workload.is_half else 0) + (plain if workload.shape.caps_scores else 0)
    return workload.shape.num_heads * workload.width * (4 + copies)


def masks(workload: Workload) -> int:
    """Bytes per token of the masks [T, T] that attention adds to scores: of eager one for each kind of layer."""
    if not (workload.eager or workload.shape.has_mask):
        return 0
    kinds = 2 if workload.shape.eager else 1
    return kinds * workload.compute_bytes * workload.width


def stream(workload: Workload) -> int:
    """Bytes per token of the states between layers, which gradient checkpointing keeps of each layer."""
    in_float32 = not workload.is_half or is_autocast(workload)
    return (4 if in_float32 else 2) * workload.shape.hidden_size


def is_autocast(workload: Workload) -> bool:
    """Whether float32 weights are cast to 16 bits as they are used: of full fine-tuning without sharding."""
    return workload.method == "full" and workload.is_half and not workload.sharded and not workload.pure_bf16


def passing(workload: Workload) -> int:
    """Bytes per token that the backward pass of a layer allocates in addition to what it keeps, at its peak.

    The peak is in the feed-forward part: the gradients of its product and of the stream. The others take the place of
    what is kept. Of eager attention it may be in softmax: its gradient and that of its input in float32, where the copy
    in bf16 and what the feed-forward part kept are free again.
    """
    shape, plain = workload.shape, workload.compute_bytes
    around = 1 if is_autocast(workload) else 5
    in_mlp = plain * (shape.intermediate_size + around * shape.hidden_size)
    if shape.experts:
        in_mlp = plain * _passing_experts(workload) * shape.hidden_size
    if not workload.eager:
        return in_mlp
    in_softmax = 2 * plain if shape.has_sinks else 8 - (plain if workload.is_half else 0)
    softmax = in_softmax * shape.num_heads * workload.width
    return max(in_mlp, softmax - feed_forward(workload) - _adapters(workload, in_mlp=True))


def _passing_experts(workload: Workload) -> int:
    """States of a token that pass when what its experts give is weighted, in numbers of ``hidden_size``."""
    experts = workload.shape.experts
    assert experts
    if workload.method != "full" and workload.shape.adapted_products(workload.lora_targets):
        return 2 * experts.per_token + 3  # as the layer is computed again: the adapter's part, and the sum with it
    # Gradients of the factors and of the sum; ``kit.model.experts`` has sorted what is weighted already.
    return (2 if workload.method == "qlora" else 3) * experts.per_token + 1
