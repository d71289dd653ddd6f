"""From samples to global batches, a pure function of seed and step, and their distribution over data ranks."""
