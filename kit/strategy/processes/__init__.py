"""The processes of a run: launcher, network, rendezvous, and the check that all ranks agree."""
