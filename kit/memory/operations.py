"""Floating-point operations of a step by formulas.

Operations per token, with p the share of supervised tokens and s the mean number of tokens that a token sees twice over
(the sum of squared lengths of samples over their sum; causal attention computes half of each square):

- forward: 2 for each weight of the layers, 2 Vh p for the head, 2 L q s for attention
- full fine-tuning: three times that, and the head's logits once more (they are computed again, not kept)
- adapters: twice that, since frozen weights get no gradient, with attention three times; 6 for each adapter weight
- gradient checkpointing: the layers' forward once more

These are the counts of the PaLM paper's appendix B (6 per weight, 12 L q s), with causal attention counted once.
"""

from kit.memory.workload import Workload


def operations_per_token(workload: Workload, supervised: float = 1.0, seen: float | None = None) -> float:
    """Operations of forward and backward pass per token.

    Args:
        supervised: the share of tokens that are learned from, at which logits are computed.
        seen: sum of squared lengths of samples over their sum, in tokens; None: the row's length.
    """
    shape = workload.shape
    layers = 2.0 * shape.num_layers * shape.layer_linear_weights
    head = 2.0 * supervised * shape.embedding_parameters
    attention = 2.0 * shape.num_layers * shape.query_size * (workload.length if seen is None else seen)
    again = (layers + attention) if workload.gradient_checkpointing else 0.0
    if workload.method == "full":
        recomputed = head if workload.loss == "chunks" else 0.0
        return 3 * (layers + head + attention) + recomputed + again
    return 2 * (layers + head) + 3 * attention + 6.0 * workload.adapter_parameters + again
