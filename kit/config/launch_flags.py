"""The settings that only the command line has: they say how a run is started, and are not part of its recipe."""

from functools import partial

from pydantic import BaseModel

from kit.schema.fields import STRICT, option

_launch = partial(option, "Launch")


class Launch(BaseModel):
    """The settings that only the command line has."""

    model_config = STRICT

    config: str | None = _launch(
        None,
        "Accelerate config: a path, or one of accelerate_configs/: single, ddp, fsdp, fsdp_hybrid, fsdp_offload, fsdp1",
    )
    recipe: str | None = _launch(None, "a path, or a name in recipes/ (`kit recipes` lists them); without it: tiny")
    num_processes: int | None = _launch(
        None, "processes over all machines; without it: one per GPU, two in a rehearsal", "processes", ge=1
    )
    sequence_parallel_size: int | None = _launch(
        None, "processes that share each row, for long rows; without it: sp_size of the config, or 1", "processes", ge=1
    )
    skip_memory_check: bool = _launch(
        False, "start even if the plan says that the GPUs' memory or the disk is too small"
    )
    dry_run: bool = _launch(False, "validate everything, count samples, tokens and steps, show the strategy, and stop")
