"""Optimisers, their groups, and the kit's own."""
