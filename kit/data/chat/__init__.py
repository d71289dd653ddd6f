"""Rows to texts and token ids, with the tokens that are learned from marked."""
