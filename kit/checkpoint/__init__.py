"""Checkpoints: complete or absent, readable under every strategy, without pickled data."""
