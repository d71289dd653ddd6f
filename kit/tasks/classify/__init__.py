"""A model that gives labels."""
