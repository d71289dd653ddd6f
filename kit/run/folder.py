"""The output folder of a run: check that it belongs to this run, and where the run resumes.

Promises:

- Nothing of another run is overwritten, unless ``overwrite_output_dir`` is set.
- The same command again resumes the run.
- Only one run at a time uses a folder.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.checkpoint.manifest import drop_after, in_the_way_after, list_checkpoints, read_state
from kit.config.commands import command_of
from kit.config.recipe import Recipe
from kit.config.settings.evaluation import EvalSettings
from kit.data.samples.bad_rows import SKIPPED_FILE, write_listed
from kit.failures import exits
from kit.hub.upload import push_at_end
from kit.run.identity import ROUNDING, changes
from kit.run.output_dir import check_owner, outputs, unfinished
from kit.run.record import RUN_FILE, own_code, versions, write_record
from kit.run.resume import choose, wanted_checkpoint
from kit.run.start_list import starts
from kit.strategy.processes.rendezvous import together
from kit.strategy.topology import ActualStrategy
from kit.system import durable, lock
from kit.system.console import is_main, say
from kit.system.durable import read_small
from kit.system.errors import Problem, UserError, raise_if
from kit.train.loop_state import LoopState
from kit.train.schedule import schedule_change

if TYPE_CHECKING:
    from accelerate import Accelerator


class RunFolder:
    """The ``output_dir`` of a run. Every rank creates one and makes the same calls; only the main process writes."""

    def __init__(self, recipe: Recipe, recipe_name: str, identity: Mapping[str, Any]) -> None:
        """Check the folder, without writing to it.

        Args:
            identity: the identity of this run, see ``kit.run.identity``.

        Raises:
            UserError: the folder, or the checkpoint to continue from, belongs to another run or cannot be used.
        """
        self._recipe = recipe
        self._recipe_name = recipe_name
        self.identity = identity
        self.path = Path(recipe.output_dir or "")
        self.checkpoints = self.path / "checkpoints"
        self.final = self.path / "final"
        self.finished_steps = check_owner(recipe, self.path, identity)  # 0: not finished, or a new run
        self._ended_early = bool(self.finished_steps) and _ended_early(recipe, self.path)
        self._seen = _snapshot(self.path)
        self._wanted = wanted_checkpoint(recipe, self.path)
        # To continue from, with its manifest; None and {}: from step 0.
        self.checkpoint, self._manifest = choose(self.checkpoints, self._wanted, identity)
        self._record: dict[str, Any] = {}
        exits.repeat_errors_in(self.path)
        step = self.loop_state().step
        if not recipe.overwrite_output_dir:
            expected = "nothing, or the folder of a checkpoint"
            raise_if(
                Problem("output_dir", f"{path} is a link or a file", expected, "move it away")
                for path in in_the_way_after(self.checkpoints, step)
            )

    def loop_state(self) -> LoopState:
        """Return the state that the run continues with. Raises ``UserError`` if the checkpoint's state is damaged."""
        if self.checkpoint is None:
            return LoopState()
        return LoopState.from_record(read_state(self.checkpoint, LoopState().record()))

    def resume(self, accelerator: "Accelerator") -> LoopState:
        """Check the checkpoint's hashes, each rank its share, and go back to the one before if it is damaged.

        After that, with ``overwrite_output_dir``, delete the old run. Called by all ranks, in the locked folder. A
        single process checked the hashes when it created this object.

        Returns:
            The state that the run continues with.

        Raises:
            UserError: on all ranks, if no checkpoint can be used, or the old run cannot be deleted.
        """
        if accelerator.num_processes > 1:
            self.checkpoint, self._manifest = choose(self.checkpoints, self._wanted, self.identity, accelerator)
        with together(accelerator):
            self._empty()
        return self.loop_state()

    def is_finished(self, first_step: int, total_steps: int, is_dry: bool = False) -> bool:
        """Return whether the run is finished: it wrote its final model after ``total_steps`` steps, or ended early.

        Prints a line if it is. A run that ended early continues if its settings of early stopping change.

        Args:
            first_step: the steps done at the checkpoint to continue from.
            is_dry: do not upload a finished run.

        Raises:
            UserError: the run is not finished and cannot continue, see ``check_continues``.
        """
        is_over = self._ended_early or self.finished_steps == total_steps
        if is_over and self._wanted == "auto" and self.final.is_dir():
            setting = "early_stopping_patience" if self._ended_early else "max_steps"
            fix = f"to continue, raise {setting}; for a new run, another --output_dir"
            say(f"this run is finished: {self.final}", fix)
            self.push(is_stopped=is_dry)  # the first upload may have failed; files that the hub has are not sent again
            return True
        self.check_continues(first_step, total_steps)
        return False

    def check_continues(self, first_step: int, total_steps: int) -> None:
        """Check that the run can continue after ``first_step``.

        Raises:
            UserError: it already did more than ``total_steps`` steps, or it finished with fewer steps and has no
                checkpoint, or the checkpoint holds weights only.
        """
        new = f"{lock.ANOTHER}; or --overwrite_output_dir true, which starts again"
        if first_step > total_steps:
            found = f"{total_steps} steps wanted, and {first_step} are done"
            expected = f"at least {first_step}, or --resume_from_checkpoint with an earlier one"
            raise UserError("max_steps", found, expected, f"--max_steps {first_step}; or {new}")
        if self._manifest.get("weights_only"):
            found = f"{self.checkpoint} holds weights only (save_only_model), so the run cannot resume from it"
            fix = f"{command_of('export.py')} writes a model to train on from, in a new run; or {new}"
            raise UserError("resume_from_checkpoint", found, "a checkpoint with the optimiser's state", fix)
        if self.finished_steps and not first_step:
            found = f"{self.path} holds a finished run of {self.finished_steps} steps and no checkpoint to resume from"
            raise UserError("output_dir", found, fix=new)

    def describe_resume(self, total_steps: int) -> list[str]:
        """Return for ``--dry_run`` where the run would continue. Raises as ``is_finished``, and prints its line."""
        step = self.loop_state().step
        if self.is_finished(step, total_steps, is_dry=True):
            return []
        if self.checkpoint:
            return [f"would continue after step {step} of {total_steps} ({self.checkpoint})"]
        return []

    def open(self) -> None:
        """Create the folder and lock it until this process ends.

        Raises:
            UserError: the folder cannot be created, another run holds its lock, or another run changed it after
                this one checked it.
        """
        if not is_main():
            return
        folder = self.path
        try:
            folder.mkdir(parents=True, exist_ok=True)
            notes = lock.acquire(folder)
            if _snapshot(folder) != self._seen:
                found = f"another run used {folder} while this one started"
                raise UserError("output_dir", found, fix="type the same command again")
            lock.sign(folder)
        except OSError as error:
            raise _cannot_write(folder, error) from None
        say(*notes)

    def _empty(self) -> None:
        """Delete the old run if ``overwrite_output_dir`` is set.

        The folder itself is kept, since it may be a mount point or a link.
        """
        recipe, folder = self._recipe, self.path
        if not (is_main() and recipe.overwrite_output_dir):
            return
        try:
            if self._seen[0]:
                # Write the record first: after a kill, the folder is recognised as that of this run.
                record = {"recipe": recipe.model_dump(mode="json"), "identity": self.identity}
                write_record(folder, {**record, "finished_steps": 0, "interrupted": None})
                for path in outputs(folder):
                    durable.remove(path)
        except OSError as error:
            raise _cannot_write(folder, error) from None

    def begin(
        self,
        strategy: ActualStrategy,
        data: dict[str, Any],
        step: int,
        total_steps: int,
        skipped_rows: Sequence[Mapping[str, Any]] = (),
        plan: Mapping[str, Any] | None = None,
    ) -> None:
        """Write ``run.json`` and the skipped rows, and delete checkpoints after ``step``: their steps are repeated.

        Args:
            strategy: the strategy that really runs.
            data: the entry ``data`` of ``run.json``.
            step: the number of steps done so far.
            total_steps: the number of steps of the whole run.
            skipped_rows: of the data, see ``kit.data.samples.bad_rows``.
            plan: see ``kit.memory.fit.plan_record``; None or empty: no plan.
        """
        about: dict[str, Any] = {"identity": self.identity, "strategy": strategy.record(), "versions": versions()}
        about["rounding"] = self._recipe.model_dump(mode="json", include=ROUNDING)
        recipe = {"recipe_name": self._recipe_name, "recipe": self._recipe.model_dump(mode="json")}
        about["own_code"] = own_code(chain.from_iterable(self._recipe.code.values()))
        about["total_steps"] = total_steps
        before = "" if self._recipe.overwrite_output_dir else self._seen[0]
        self._record = {**recipe, **about, "data": data, "starts": starts(before, {**recipe, **about}, step)}
        self._record["plan"] = dict(plan or {})
        if self.checkpoint:
            say(f"continuing after step {step} of {total_steps} ({self.checkpoint})")
            if changed := ", ".join(changes(self._manifest, about)):
                say(f"note: changed since that checkpoint: {changed}; the steps from here on differ")
            was = self._manifest.get("total_steps", total_steps)
            say(*schedule_change(self._recipe, self._recipe.peak_learning_rate, step, was, total_steps))
        elif before:
            say(f"{self.path} holds this run and no checkpoint: it starts again from step 1")
        if is_main():
            for path in unfinished(self.path):
                durable.remove(path)
            drop_after(self.checkpoints, step)
            if skipped_rows:
                write_listed(self.path / SKIPPED_FILE, skipped_rows)
            (self.path / exits.ERROR_FILE).unlink(missing_ok=True)
            self._write()

    @property
    def about(self) -> dict[str, Any]:
        """The entries of ``run.json`` that each manifest has too."""
        return {
            key: self._record[key]
            for key in ("identity", "strategy", "versions", "rounding", "own_code", "total_steps")
        }

    def end(self, step: int, stopped: bool, early: str = "") -> None:
        """Write to ``run.json`` that the run finished after ``step`` steps, or that a signal stopped it there.

        This is written because launchers hide the exit status of the script.

        Args:
            early: why the run finished before its last step; empty if it did not.
        """
        if stopped:
            self._write(interrupted=step)
        else:
            self._write(finished_steps=step, ended_early=early or None)

    def push(self, is_stopped: bool, wait: Callable[[], object] = lambda: None) -> None:
        """Upload ``final/`` to ``push_to_hub``; the other ranks need not wait. Never raises.

        Args:
            wait: called again and again while it is uploaded.
        """
        if self._recipe.push_to_hub and is_main() and not is_stopped:
            push_at_end(self.path, self._recipe.push_to_hub, wait)

    def _write(self, finished_steps: int = 0, interrupted: int | None = None, ended_early: str | None = None) -> None:
        """Write ``run.json``: recipe, identity, strategy, versions, data, and how far the run came."""
        if is_main():
            ends = {"finished_steps": finished_steps, "interrupted": interrupted, "ended_early": ended_early}
            write_record(self.path, {**self._record, **ends})


def _ended_early(settings: EvalSettings, folder: Path) -> bool:
    """Whether the finished run in the folder ended early, by the same settings of early stopping."""
    record = json.loads(read_small(folder / RUN_FILE))
    keys = ("early_stopping_patience", "metric_for_best_model")
    return bool(record.get("ended_early")) and all(record["recipe"].get(key) == getattr(settings, key) for key in keys)


def _cannot_write(folder: Path, error: OSError) -> UserError:
    return UserError("output_dir", f"{folder}: {error.strerror or error}", "a folder to write to")


def _snapshot(folder: Path) -> list[str]:
    """The text of ``run.json`` and the names of the checkpoints. If a run worked here in between, they differ."""
    try:
        record = read_small(folder / RUN_FILE)
    except (OSError, ValueError):
        record = ""
    return [record, *(path.name for path in list_checkpoints(folder / "checkpoints"))]
