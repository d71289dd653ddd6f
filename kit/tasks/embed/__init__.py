"""A model that gives embeddings."""
