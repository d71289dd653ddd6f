"""Settings of the output and checkpoints."""

from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, StringConstraints

from kit.schema.fields import STRICT, comma_separated, fraction_or_count, option
from kit.schema.rules import steps_rules

_option = partial(option, "Output and checkpoints")


class OutputSettings(BaseModel):
    """The outputs of a run: its folder, checkpoints, metrics and trackers."""

    model_config = STRICT

    output_dir: str | None = _option(None, "folder of the run; default: runs/<recipe>-<config>")
    overwrite_output_dir: bool = _option(False, "delete the earlier run in output_dir")
    save_strategy: Literal["no", "steps", "epoch"] | None = _option(
        None, "when to save before the end: every save_steps, after each epoch, or not; default: follows save_steps"
    )
    save_steps: Annotated[float, Field(ge=0), AfterValidator(fraction_or_count)] | Literal["auto"] = _option(
        "auto",
        "save every N steps; below 1 a fraction of all steps; 0: at the end only; auto: about every 30 minutes",
        "steps",
        expected="whole number from 0, fraction below 1, or auto",
    )
    save_total_limit: int = _option(2, "complete checkpoints to keep; 0: all", "checkpoints", ge=0)
    keep_best: bool = _option(False, "save at each new best metric_for_best_model, and keep the best checkpoint too")
    save_only_model: bool = _option(
        False, "save only the weights: a third of the size, but no run can resume from such checkpoints"
    )
    push_to_hub: Annotated[str, StringConstraints(pattern=r"^[^/\s]+/[^/\s]+$")] | None = _option(
        None, "OWNER/NAME: upload final/ to the hub at the end, private; checked at the start", expected="OWNER/NAME"
    )
    async_save: bool = _option(
        True, "write checkpoints while training continues; takes host memory for a copy of the saved state"
    )
    resume_from_checkpoint: str = _option("auto", "auto (the newest), none, or the path of a checkpoint")
    logging_steps: int = _option(1, "write metrics every N steps", "steps", ge=1)
    report_to: Annotated[
        list[Literal["tensorboard", "wandb", "trackio"]],
        BeforeValidator(comma_separated),
    ] = _option([], "trackers, separated by commas: tensorboard, wandb, trackio")
    run_name: str | None = _option(
        None, "name of the run in trackers; default: the tracker chooses one", needs="report_to"
    )
    project: str = _option("kit", "project of the run in trackers", needs="report_to")

    @property
    def saves_by_time(self) -> bool:
        """Whether saves follow the clock: about every 30 minutes."""
        return self.save_steps == "auto" and self.save_strategy is None

    @property
    def num_save_steps(self) -> float:
        """``save_steps`` as a number: 0 if it is auto."""
        return 0 if self.save_steps == "auto" else self.save_steps


RULES = steps_rules("save")
