"""The only package that knows DDP, FSDP and launchers: from an Accelerate config to a model on all ranks."""
