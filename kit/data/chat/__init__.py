"""Rows become texts and token ids, with a loss mask: the weight of each token."""
