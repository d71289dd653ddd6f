"""Answers that the model writes in training, and their rewards."""
