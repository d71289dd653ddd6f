"""From an Accelerate config to a model on all ranks. The only package that knows DDP, FSDP and launchers."""
