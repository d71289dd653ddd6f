"""Kill a run, continue it, and compare it with one that was not interrupted."""
