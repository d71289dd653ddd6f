"""Find, check, load and quantise a causal language model, and attach adapters. Independent of the strategy."""
