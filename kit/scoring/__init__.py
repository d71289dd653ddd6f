"""Scores of generated answers: metrics, reward functions, and functions of the user."""
