"""Layers, and what wraps or replaces them: attention, packs, loss head, checkpointing, compilation."""
