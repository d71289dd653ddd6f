"""The surroundings of a run: its ranks, files, signals and counters.

The order of events stays in ``recipes/finetune.py``: nothing here calls a model, an objective or an evaluation.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from kit.checkpoint.load import load_checkpoint
from kit.checkpoint.save import Saver
from kit.config.commands import command_of
from kit.config.paths import RECIPES
from kit.config.recipe import DEFAULT_RECIPE
from kit.data.feed.feed import BatchSource, GlobalBatch, by_file
from kit.failures import exits
from kit.failures.signals import StopRequest
from kit.run.checked import Checked
from kit.run.evaluation import Evaluation
from kit.run.log import Log
from kit.run.shared import check_shared
from kit.strategy.processes.rendezvous import together
from kit.system import phases
from kit.system.console import say
from kit.system.errors import TrainingError
from kit.train.loss_scaling import LEAST
from kit.train.policy import Policy
from kit.train.schedule import evaluation_is_due, save_is_due
from kit.train.session import Session
from kit.train.step import StepResult

NEXT_FLAGS = "--config single --recipe smollm3-3b-lora --dataset my.jsonl"


class Run(Session):
    """A run of ``recipes/finetune.py``. Every rank creates one and makes the same calls.

    Attributes:
        checked: what preflight opened.
        state: of the loop, as the last checkpoint has it and then as the steps change it.
        saver, log, stop: from ``begin`` on. ``stop.is_agreed`` says on all ranks that the run stops.
    """

    log: Log
    saver: Saver
    stop: StopRequest

    def __init__(self, checked: Checked) -> None:
        """Join the ranks, lock the output folder, and choose the checkpoint to resume from.

        Raises:
            UserError: on all ranks, if the folder or its checkpoints cannot be used; and as ``Session``.
        """
        assert checked.topology is not None and checked.folder is not None
        super().__init__(checked.recipe, checked.topology, checked.facts(), trains=True)
        self.checked, self.folder = checked, checked.folder
        with together(self.accelerator):  # an error on one rank stops all ranks
            self.folder.open()
        check_shared(self.accelerator, self.folder.path)
        self.state = self.folder.resume(self.accelerator)  # of an earlier checkpoint, if the newest is damaged
        self.folder.check_continues(self.state.step, checked.total_steps)
        self._is_saved = True  # whether a checkpoint has all steps so far
        self._asks_to_save = self._is_best = False  # of the last step

    def begin(self, policy: Policy) -> None:
        """Load the checkpoint, write ``run.json``, and open ``metrics.jsonl``, the trackers and the saver.

        From here on a signal saves and stops.
        """
        checked, folder, state = self.checked, self.folder, self.state
        recipe, data, total_steps = checked.recipe, checked.data, checked.total_steps
        if folder.checkpoint:
            load_checkpoint(policy.model, policy.optimizer, folder.checkpoint)
        folder.begin(
            policy.strategy, checked.describe_data(), state.step, total_steps, data.skipped_rows(), checked.plan
        )
        self.log = Log(self.accelerator, recipe, folder.path, state, total_steps, data.dataset_names, checked.workload)
        self.saver = Saver(
            self.accelerator,
            recipe,
            folder.checkpoints,
            folder.about,
            synced_first=self.log.path,
            on_work=self.guard.enter_save,
            timeout_seconds=recipe.ddp_timeout,
        )
        exits.finish_first(self.saver.finish)
        self.stop = StopRequest(self.accelerator)
        self.progress = self.stop.interruptible(self.guard.progress)

    def wants_to_stop(self) -> bool:
        """Whether this rank got a signal, or its last save failed: the save that follows raises on all ranks."""
        return self.stop.is_made or self.saver.has_failed

    def evaluation_is_due(self, step: int) -> bool:
        """Whether to evaluate after ``step`` steps: by the schedule, once, and not if a stop is agreed."""
        recipe, data, total_steps = self.checked.recipe, self.checked.data, self.checked.total_steps
        if data.evaluation is None or self.state.evaluated_step == step or self.stop.is_agreed:
            return False
        return evaluation_is_due(recipe, data, total_steps, step)

    def end_evaluation(self, evaluation: Evaluation) -> None:
        """Log an evaluation, and note whether it is the best so far."""
        step, metric = self.state.step, self.checked.recipe.metric_for_best_model
        self.log.evaluation(step, evaluation)
        self._is_best = self.state.end_evaluation(step, evaluation.metrics, metric)

    def save_is_due(self, step: int) -> bool:
        """Whether to save after ``step`` steps: by the schedule, for a new best, or as the loop ends."""
        if self._is_saved:
            return False
        recipe, data, total_steps = self.checked.recipe, self.checked.data, self.checked.total_steps
        is_kept = (self._is_best and recipe.keep_best) or self.is_over(step)
        return is_kept or self._asks_to_save or save_is_due(recipe, data, total_steps, step)

    def save(self, policy: Policy, feed: BatchSource) -> None:
        """Start to write a checkpoint; only the weights with ``save_only_model``, unless a signal stopped the run."""
        self.enter(phases.SAVING, self.state.step)
        self.state.feed = feed.state()
        weights_only = self.checked.recipe.save_only_model and not self.stop.is_agreed
        self.saver.save(policy.model, policy.optimizer, self.state.record(), weights_only)
        self._is_saved = True

    def is_over(self, step: int) -> bool:
        """Whether the loop ends after ``step`` steps: it was the last, an early stop, or a stop is agreed."""
        return step == self.checked.total_steps or self.stop.is_agreed or bool(self._early_stop_reason)

    @property
    def loss_scale(self) -> float | None:
        """That of the next step; None without fp16."""
        return self.state.loss_scale if self.topology.mixed_precision == "fp16" else None

    def end_step(self, batch: GlobalBatch, result: StepResult, rate: float) -> None:
        """Count and log a step, and agree to stop if a rank was asked to.

        Raises:
            TrainingError: more than ``max_nonfinite_steps`` steps in a row had NaN/Inf, or no scale helps in fp16.
        """
        recipe, state = self.checked.recipe, self.state
        step = state.step + 1
        spike = state.end_step(step, result, 0 if recipe.rolls_out else recipe.loss_spike_ratio)
        self.log.step(batch, result, rate, spike)
        if state.nonfinite_steps > recipe.max_nonfinite_steps:
            raise _nonfinite_error(step, result, batch)
        if state.loss_scale < LEAST:
            raise _overflow_error(step, result)
        self.stop.is_agreed = result.stop and step < self.checked.total_steps  # else the run ends anyway
        self._is_saved = self._is_best = False
        self._asks_to_save = result.save

    def end(self, feed: BatchSource, write_report: Callable[[Path], None]) -> None:
        """Write to ``run.json`` how the run ended, print it, and write the report. After a stop, exit with its status.

        The final model is uploaded if the recipe says so.

        Args:
            write_report: of the run in a folder.
        """
        is_stopped = self.stop.is_agreed
        self.folder.end(self.state.step, is_stopped, self._early_stop_reason)
        self.log.end(self.stop.reason if is_stopped else "", feed.closing_notes())
        write_report(self.folder.path)
        self.folder.push(is_stopped, wait=partial(self.enter, phases.WRITING_FINAL))
        if is_stopped:
            self.accelerator.wait_for_everyone()  # a launcher ends all ranks when the first one leaves
            self.stop.leave()
        if RECIPES / DEFAULT_RECIPE in Path(self.checked.recipe.dataset_entries[0].path).parents:
            say("next, with a real model (`kit recipes` lists more):", f"    {command_of('finetune.py')} {NEXT_FLAGS}")

    @property
    def _early_stop_reason(self) -> str:
        return self.state.early_stop_reason(self.checked.recipe, self.checked.total_steps)


def _nonfinite_error(step: int, result: StepResult, batch: GlobalBatch) -> TrainingError:
    """The error for ``step`` (from 1), whose loss or gradient norm is NaN/Inf."""
    return TrainingError(
        f"step {step}: {result.values}; weights unchanged. Samples: {by_file(batch.origins)}\n"
        "    -> the same command fails at the same step again: fix or remove the sample that causes it, or train with\n"
        "       another learning_rate or mixed_precision; --max_nonfinite_steps N skips up to N such steps in a row"
    )


def _overflow_error(step: int, result: StepResult) -> TrainingError:
    """The error for ``step`` (from 1), whose gradients fp16 cannot hold though the loss is not scaled."""
    return TrainingError(
        f"step {step}: {result.values}; the gradients overflow in fp16 even with loss_scale {LEAST:g}\n"
        "    -> mixed_precision: bf16 on a GPU that has it, or no; or a lower learning_rate"
    )
