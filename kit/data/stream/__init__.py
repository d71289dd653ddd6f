"""Training data that is read during training, for data sets that do not fit on a disk."""
