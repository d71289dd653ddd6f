"""Check a machine, and a planned run on it, in seconds: before a queue, a download or a GPU is paid for."""
