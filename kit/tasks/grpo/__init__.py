"""The model's own answers, with rewards."""
