"""Fine-tuning recipe kit: one readable loop, every topology, the same maths."""

__version__ = "0.1.0"
