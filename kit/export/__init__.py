"""Write models that can be opened without the kit: ``final/``, exported checkpoints, merged adapters."""
