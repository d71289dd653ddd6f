"""Numbers for an answer that a model wrote: metrics, rewards, and those of the user."""
