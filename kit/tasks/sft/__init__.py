"""Answers to imitate."""
