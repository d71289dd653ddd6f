"""Rollouts: completions sampled in training, and their rewards."""
