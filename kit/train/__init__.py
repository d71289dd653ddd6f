"""One optimiser step, what it minimises, and what a checkpoint keeps of the loop."""
