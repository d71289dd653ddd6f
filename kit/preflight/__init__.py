"""Every check before a weight is read."""
