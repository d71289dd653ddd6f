"""A model that gives rewards."""
