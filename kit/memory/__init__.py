"""Memory: what a run needs on a GPU, the host and the disk, and what helps when it runs out."""
