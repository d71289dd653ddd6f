"""Rows become texts and token ids; the tokens to learn from are marked."""
