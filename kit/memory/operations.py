"""Floating-point operations of a step by formulas.

Operations per token, with p the share of supervised tokens and s the mean number of tokens that a token sees twice over
(the sum of squared lengths of samples over their sum; causal attention computes half of each square):

- forward: 2 for each weight of the layers (of experts, those that the token reaches), 2 Vh p for the head, 2 L q s for
  attention
- full fine-tuning: three times that, and the head's logits once more (they are computed again, not kept)
- adapters: twice that, since frozen weights get no gradient, with attention three times; 6 for each adapter weight
- gradient checkpointing: the layers' forward once more; of the selective one only what is narrow: 2 for each weight of
  an adapter; ``tiled_mlp`` computes the feed-forward part of each layer yet again
- the tower of a model that reads images, for each patch: 2 for each of its weights and 4 L h s for attention, which is
  not causal; three times that if it trains, and its forward once more with checkpointing
- each pass without gradients, as of a reference: a forward once more; of a teacher, its forward

These are the counts of the PaLM paper's appendix B (6 per weight, 12 L q s), with causal attention counted once.
"""

from collections.abc import Callable
from dataclasses import replace

from kit.memory.shape import Linear, Shape
from kit.memory.workload import Workload
from kit.model.layers.checkpointing import is_wide


def without_recomputation(workload: Workload) -> Workload:
    """The same work without recomputation to save memory.

    Its operations are for comparing configurations: recomputation makes no step faster.
    """
    return replace(workload, gradient_checkpointing=False, loss="whole")


def operations_per_token(workload: Workload, supervised: float = 1.0, seen: float | None = None) -> float:
    """Operations of a step per token of its samples: forward and backward pass, and no-grad passes.

    Each token of both halves of a pair counts once, however many passes compute it.

    Args:
        supervised: the fraction of supervised tokens, at which logits are computed.
        seen: sum of squared lengths of sequences over their sum, in tokens; None: the workload's length.
    """
    layers, head, attention = _forward(workload, supervised, seen)
    of_tower = _tower(workload)
    again = of_tower * (1 + workload.passes)
    if (tower := workload.of_tower) and tower.method == "full":
        again += of_tower * (3 if workload.gradient_checkpointing is True else 2)
    again += workload.passes * (layers + head + attention)
    again += _recomputed(workload, layers, attention)
    if (teacher := workload.as_teacher) and not workload.teacher_top_k:
        again += forward_operations_per_token(teacher, supervised, seen)
    if workload.method == "full":
        recomputed = head if workload.loss == "chunks" else 0.0
        return 3 * (layers + head + attention) + recomputed + again
    return 2 * (layers + head) + 3 * attention + 6.0 * workload.adapter_of_token + again


def orthogonalising_operations(workload: Workload) -> float:
    """Return the operations of Muon's Newton-Schulz iteration on the matrices of all layers, 0 for another optimiser.

    Each of its five steps multiplies a matrix [n, m], n <= m, by its transpose, the product by itself, and that by the
    matrix.
    """
    if workload.optim != "muon" or workload.method != "full":  # matrices of adapters are small
        return 0.0
    total = 0.0
    for number, kind in workload.shape.kinds:
        sizes = [sorted((linear.inputs, linear.outputs)) for linear in kind.linears]
        total += 5.0 * number * sum(4 * n * n * m + 2 * n**3 for n, m in sizes)
    return total


def forward_operations_per_token(workload: Workload, supervised: float = 1.0, seen: float | None = None) -> float:
    """Operations of one no-grad pass per token, without adapters. Arguments as above."""
    return sum(_forward(workload, supervised, seen)) + _tower(workload)


def _tower(workload: Workload) -> float:
    """Operations of a forward pass of the tower, per token of the rows."""
    tower, own = workload.shape.tower, workload.of_tower
    if tower is None or own is None:
        return 0.0
    seen = tower.patches_seen or workload.image_tokens * tower.patches_per_token
    projector = 2.0 * tower.parameters.get("projector", 0) / tower.patches_per_token
    layer = 2.0 * own.shape.layer_linear_weights + 4.0 * own.shape.query_size * seen
    return (own.shape.num_layers * layer + projector) * own.tokens / workload.tokens


def _recomputed(workload: Workload, layers: float, attention: float) -> float:
    """Operations per token that the backward pass recomputes: of ``layers`` and ``attention``, and of adapters."""
    if not workload.gradient_checkpointing:
        return 0.0
    shape = workload.shape
    if workload.gradient_checkpointing is True:
        in_tiles = _weights_of(shape, lambda each: each.is_in_mlp) if workload.tiled_mlp else 0
        return layers + attention + 2.0 * in_tiles
    narrow: float = _weights_of(shape, lambda each: not is_wide(each.inputs, each.outputs))
    if not is_wide(shape.hidden_size, workload.lora_r):
        narrow += workload.adapter_of_token
    return 2.0 * narrow + (attention if workload.eager else 0.0)


def _forward(workload: Workload, supervised: float, seen: float | None) -> tuple[float, float, float]:
    """Operations of a forward pass per token: of the layers' matrices, of the head, and of attention."""
    shape = workload.shape
    before = workload.length if seen is None else seen
    return (
        2.0 * shape.multiplied,
        2.0 * supervised * shape.embedding_parameters * workload.has_lm_head,
        2.0 * sum(number * kind.query_size * min(before, kind.attended or before) for number, kind in shape.kinds),
    )


def _weights_of(shape: Shape, is_counted: Callable[[Linear], bool]) -> int:
    """Weights of those linear modules of all layers."""
    return sum(
        number * sum(each.num_weights for each in kind.linears if is_counted(each)) for number, kind in shape.kinds
    )
