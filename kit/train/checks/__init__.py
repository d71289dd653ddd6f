"""Proofs before and in training: the loss head, packs, replicas, compiled layers."""
