"""The trackers of ``report_to``. Each shows one run, however often it was resumed.

Promises: a run keeps its identifier when it resumes, and each tracker finds the run by it. TensorBoard shows repeated
steps once; in the others the later value counts.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.config.settings.output import OutputSettings
from kit.system.errors import UserError, first_line

if TYPE_CHECKING:
    from accelerate import Accelerator


def start_trackers(
    accelerator: "Accelerator",
    settings: OutputSettings,
    about: Mapping[str, Any],
    identifier: str,
    step: int,
    output_dir: Path,
    kept: Iterable[Mapping[str, Any]],
) -> None:
    """Start the trackers of ``report_to``, each with its project, and give them the settings of the run.

    Called by the main process.

    Args:
        about: all settings of the run.
        identifier: of the run, the same for all its starts.
        step: the number of steps done so far.
        kept: the rows of ``step`` in ``metrics.jsonl``, which TensorBoard gets again.

    Raises:
        UserError: a tracker does not start.
    """
    has_begun = (output_dir / "kit").exists()  # TensorBoard's folder; its settings are written only once
    wanted, started = accelerator.log_with, []
    for tracker in wanted:
        # TensorBoard's project is a folder in output_dir. It keeps one name, by which a resume finds it and
        # ``overwrite_output_dir`` deletes it.
        project = "kit" if str(tracker) == "tensorboard" else settings.project
        accelerator.log_with, accelerator.trackers = [tracker], []
        try:
            options = _options(str(tracker), settings.run_name, identifier, step)
            accelerator.init_trackers(project, init_kwargs={str(tracker): options})
        except Exception as error:  # its network, its account, or its own settings
            others = ",".join(name for name in settings.report_to if name != str(tracker)) or "none"
            found = f"{tracker} does not start ({first_line(error)})"
            raise UserError("report_to", found, fix=f"--report_to {others}, which leaves it out") from None
        started += accelerator.trackers
        for each in accelerator.trackers:
            if not (each.name == "tensorboard" and has_begun):
                each.store_init_configuration(_flat(about))
            if each.name == "tensorboard":
                for row in kept:
                    each.log(_numbers(row), step=row["step"])
    accelerator.log_with, accelerator.trackers = wanted, started


def track(accelerator: "Accelerator", row: Mapping[str, Any]) -> None:
    """Give the numbers of a row of ``metrics.jsonl`` to all trackers. Called by the main process."""
    for tracker in accelerator.trackers:
        tracker.log(_numbers(row), step=int(row["step"]))


def _options(tracker: str, name: str | None, identifier: str, step: int) -> dict[str, Any]:
    """Options with which a tracker names a run, and continues its curves after a resume."""
    if tracker == "tensorboard":
        # It hides entries from `purge_step` on. The steps after the checkpoint are repeated. The evaluation of
        # the checkpoint's own step may be repeated too. So that step is hidden as well, and its remaining rows are
        # logged again.
        return {"purge_step": step}
    if tracker == "trackio":  # it knows a run by its name only. The identifier keeps two runs of one name apart.
        return {"name": f"{name}-{identifier}" if name else identifier, "resume": "allow"}
    return {"id": identifier, "resume": "allow", **({"name": name} if name else {})}


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a row. An evaluation's has some of its step's again, which would stand twice."""
    left_out = {"step"} if "loss" in row else {"step", "tokens_seen", "seconds"}
    return {key: value for key, value in row.items() if key not in left_out and isinstance(value, int | float)}


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as plain values; others as strings, because trackers do not take them."""
    return {key: value if isinstance(value, int | float | str | bool) else str(value) for key, value in values.items()}
