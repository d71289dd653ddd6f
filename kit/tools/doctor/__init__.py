"""kit doctor: check a machine, and a planned run on it, in seconds, before a run."""
