"""The forms of quantised checkpoints that are read as plain weights, a file for each: see ``dequantise``."""
