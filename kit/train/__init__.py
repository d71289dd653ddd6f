"""One optimiser step, the objective that it minimises, and the state of the loop that a checkpoint stores."""
