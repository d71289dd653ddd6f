"""Training data that is read during training, for datasets that do not fit on a disk."""
