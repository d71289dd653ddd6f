"""How many positions the loss head computes logits for at a time.

Plain Python, so that memory can be planned without torch (``kit.memory.formulas``).
"""

# Size of a chunk's logits in float32. In all, a chunk of a frozen head takes twice as much, and one of a trained head,
# which torch differentiates, four times.
CHUNK_BYTES = 128 * 2**20


def chunk_size(vocab_size: int, hidden_size: int, head_trains: bool) -> int:
    """Return the positions of a chunk: those whose float32 logits take ``CHUNK_BYTES``.

    A trained head takes at least an eighth of ``hidden_size``: each chunk adds to the gradient [V, h] of the head, and
    many small chunks would spend their time on that.
    """
    size = max(1, CHUNK_BYTES // (4 * vocab_size))
    return max(size, hidden_size // 8) if head_trains else size
