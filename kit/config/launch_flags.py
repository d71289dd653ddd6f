"""The flags that start a run. They are not part of a recipe, so no recipe file has them."""

from functools import partial

from pydantic import BaseModel

from kit.schema.fields import STRICT, option

_launch = partial(option, "Launch")


class Launch(BaseModel):
    """The flags that only the command line has."""

    model_config = STRICT

    config: str | None = _launch(
        None,
        "Accelerate config: a path, or one of accelerate_configs/: single, ddp, fsdp, fsdp_hybrid, fsdp_offload, fsdp1",
    )
    recipe: str | None = _launch(None, "a path, or a name in recipes/ (`kit recipes` lists them); default: tiny")
    num_processes: int | None = _launch(
        None,
        "world size: processes over all machines; default: one per GPU, two in a dry run on a CPU",
        "processes",
        ge=1,
    )
    sequence_parallel_size: int | None = _launch(
        None,
        "sequence-parallel group size (Ulysses), for long rows; default: sp_size of the config, or 1",
        "processes",
        ge=1,
    )
    skip_memory_check: bool = _launch(
        False, "start even if the plan says that the GPUs' memory or the disk is too small"
    )
    dry_run: bool = _launch(False, "validate everything, count samples, tokens and steps, show the strategy, and stop")
