"""Fused experts of mixture-of-experts models: 4-bit weights, and LoRA on them."""
