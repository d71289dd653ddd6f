"""Checkpoints: complete or absent, readable under any strategy, nothing pickled."""
