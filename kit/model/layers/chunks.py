"""Chunked cross-entropy: for how many positions the loss head computes logits at a time.

Plain Python, so that memory can be planned without torch (``kit.memory.formulas``).
"""

# Size of a chunk's logits in float32. In all, a chunk of a frozen head takes twice as much, and one of a trained head,
# which torch differentiates, four times.
CHUNK_BYTES = 128 * 2**20
# Rows of the tiles in which a GPU computes products. A last tile that is not full takes as long as a full one.
TILE = 256
# Positions beyond which larger products are hardly faster, if they take at most this share of a GPU's memory.
ENOUGH, SHARE = 1024, 0.02


def chunk_size(vocab_size: int, hidden_size: int, head_trains: bool, device_memory: int | None = None) -> int:
    """Return the positions of a chunk: those whose float32 logits take ``CHUNK_BYTES``.

    A trained head takes at least an eighth of ``hidden_size``: each chunk adds to the gradient [V, h] of the head, and
    many small chunks would spend their time on that. On a GPU it is a multiple of ``TILE``, and up to ``ENOUGH`` if the
    chunk takes at most ``SHARE`` of the memory.

    Args:
        device_memory: bytes of the GPU; None: another device, or not known.
    """
    size = max(1, CHUNK_BYTES // (4 * vocab_size))
    if head_trains:
        size = max(size, hidden_size // 8)
    if device_memory is None:
        return size
    room = int(SHARE * device_memory) // ((16 if head_trains else 8) * vocab_size)
    return max(-(-size // TILE), min(ENOUGH, room) // TILE) * TILE
