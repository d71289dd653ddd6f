"""Token ids to samples on disk, made once and shared by all processes."""
