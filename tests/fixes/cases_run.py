"""Fixes of the run's folder, of checkpoints, of launching and of machines."""

UNTYPED: dict[str, str] = {}
