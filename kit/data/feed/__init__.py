"""Samples to global batches: a pure function of seed and step, dealt to data ranks."""
