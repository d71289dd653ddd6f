"""Write models that open without the kit: ``final/``, exported checkpoints, merged adapters."""
