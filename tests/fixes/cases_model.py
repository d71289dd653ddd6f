"""Fixes of the model, of adapters and of memory."""

UNTYPED: dict[str, str] = {}
