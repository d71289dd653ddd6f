"""Find, check, load, quantise and adapt a causal language model; knows no strategy."""
