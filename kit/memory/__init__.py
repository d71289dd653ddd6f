"""Memory: what a run needs of a GPU, of its host and of the disk, and what helps when it runs out."""
