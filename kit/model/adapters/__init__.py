"""PEFT adapters, and which weights of a model are trained."""
