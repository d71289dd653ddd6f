"""Bytes to micro-batches: read rows, make samples of them, keep these, and deal them to steps and ranks."""
