"""Predict the memory and the time of a run before it starts."""
