"""Pages: a run at a glance, samples as they are learned from."""
