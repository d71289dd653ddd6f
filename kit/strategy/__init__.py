"""Distributed training: from an Accelerate config to a model on all ranks. Only this package knows DDP and FSDP."""
