"""Log a run: progress bar, printed lines, ``metrics.jsonl`` and trackers."""

import json
import math
import shlex
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.checkpoint.manifest import name_of
from kit.config.commands import command_of
from kit.config.conflicts import find_conflicts
from kit.data.feed.feed import by_file
from kit.run.evaluation import Answer, Evaluation
from kit.run.generation_warnings import missing_prompts, truncated_answers
from kit.run.record import METRICS_FILE, is_evaluation, metrics_row
from kit.run.throughput import Throughput, speed_text
from kit.run.trackers import start_trackers, track
from kit.scoring.metrics import is_share
from kit.strategy.accelerator import data_ranks
from kit.system import durable
from kit.system.console import QUIET_SECONDS, bar, say
from kit.system.credentials import redacted
from kit.tasks.spec import TaskMetric
from kit.train.loop_state import OF_THE_DATA

if TYPE_CHECKING:
    from accelerate import Accelerator

    from kit.config.recipe import Recipe
    from kit.data.feed.feed import GlobalBatch
    from kit.memory.workload import Workload
    from kit.train.loop_state import LoopState, LossSpike
    from kit.train.step import StepResult

SUPERVISED_LOSS = "SupervisedLoss"  # the objective whose loss is of the same kind as eval_loss
# Packing is advised once, and never chosen: it changes the global batch.
_MUCH_PADDING = 0.2
_STEPS_BEFORE_ADVICE = 10
# Metrics in each line about a step or an evaluation, before those of the objective.
_SHOWN = (TaskMetric("loss", "loss", ".4f"), TaskMetric("perplexity", "perplexity"))


class Log:
    """Logs the steps and evaluations of a run. Every rank makes the same calls; only the main process writes."""

    def __init__(
        self,
        accelerator: "Accelerator",
        recipe: "Recipe",
        output_dir: Path,
        state: "LoopState",
        total_steps: int,
        dataset_names: list[str],
        workload: "Workload | None" = None,
    ) -> None:
        """
        Args:
            output_dir: of the run; ``metrics.jsonl`` is written there.
            state: of the loop; the loop updates it before it calls ``step``.
            total_steps: the number of steps of the whole run.
            dataset_names: the names of the training datasets.
            workload: of a step; None: not known.
        """
        self.accelerator = accelerator
        self.recipe = recipe
        self.state = state
        self.is_main = accelerator.is_main_process
        self.total_steps = total_steps
        self.dataset_names = dataset_names
        self.throughput = Throughput(data_ranks(accelerator), accelerator.device, workload)
        state.start_clock()
        self.last_line = -QUIET_SECONDS
        packed = recipe.model_copy(update={"packing": True})
        self._advises_packing = not recipe.packing and not any(find_conflicts(packed, {}, set()))
        metric = recipe.metric_for_best_model
        if self._follows_evaluations and state.follows_another(metric):
            say(f"{metric} was not tracked before step {state.step}: the best value counts from here on")
        if recipe.report_to and not state.tracker_id:
            state.tracker_id = uuid.uuid4().hex[:8]
        self.path = output_dir / METRICS_FILE
        self.bar: Any = None
        kept = []
        if self.is_main:
            durable.open_to_append(self.path).close()
            kept = _drop_lines_after(self.path, state.step, state.evaluated_step)
            if sys.stderr.isatty():
                self.bar = bar("", "step", total_steps, state.step)
        if recipe.report_to and self.is_main:
            start_trackers(accelerator, recipe, recipe.model_dump(), state.tracker_id, state.step, output_dir, kept)

    def step(
        self, batch: "GlobalBatch", result: "StepResult", learning_rate: float, spike: "LossSpike | None" = None
    ) -> None:
        """Log the step that ``state`` counted last.

        ``metrics.jsonl`` gets a line every ``logging_steps`` steps, at the last step, for a loss spike, and for a
        skipped step. With fp16 it has the step's ``loss_scale`` and the number of ``overflows`` so far. Token counts
        are over all ranks.
        """
        step = self.state.step
        metrics: dict[str, float] = {
            "epoch": batch.epoch,
            "loss": result.loss,
            "learning_rate": learning_rate,
            "grad_norm": result.grad_norm,
            "supervised_tokens": int(batch.num_targets.sum()),
            "tokens": int(batch.num_tokens.sum()),
        }
        self.state.tokens_seen += int(metrics["tokens"])
        self.throughput.add(batch)
        if self.bar is not None:
            self.bar.update(1)
        if result.loss_scale is not None:
            metrics |= {"loss_scale": result.loss_scale, "overflows": self.state.overflows}
        if not result.is_finite and not result.overflowed:
            self._log_skipped_step(step, batch, result)
            return
        if not spike and not result.overflowed and step % self.recipe.logging_steps and step != self.total_steps:
            return
        speed = self.throughput.take()
        if not self.is_main:
            return
        if spike:
            text = f"step {step}: loss {result.loss:.4f} is {spike.ratio:.1f} times the median of the last"
            say(f"warning: {text} {spike.num_steps} steps; samples: {by_file(batch.origins)}")
            metrics["loss_spike"] = spike.ratio
        if result.overflowed:
            now = f"loss_scale is now {self.state.loss_scale:,.0f}"
            say(f"step {step}: gradients overflow in fp16: skipped, weights unchanged; {now}")
        padding = speed.get("padding_share", 0.0)
        if self._advises_packing and step >= _STEPS_BEFORE_ADVICE and padding > _MUCH_PADDING:
            self._advises_packing = False
            about = f"{padding:.0%} of the computed tokens are padding, which --packing true leaves out"
            say(f"note: {about}; global_batch_size then counts packs, so another run is needed")
        row: dict[str, Any] = {"step": step, **metrics, **speed}
        row |= {"tokens_seen": self.state.tokens_seen, "seconds": self.state.elapsed_seconds}
        if result.objective != SUPERVISED_LOSS:
            row["objective"] = result.objective
        row |= batch.metrics
        if batch.answers:
            row["rollout"] = [
                {name: redacted(value) if isinstance(value, str) else value for name, value in answer.items()}
                for answer in batch.answers
            ]
        if spike:
            row["samples"] = [redacted(origin) for origin in batch.origins]
        row |= result.metrics
        if len(self.dataset_names) > 1:
            for name, num_targets, num_tokens in zip(
                self.dataset_names, batch.num_targets, batch.num_tokens, strict=True
            ):
                row |= {f"supervised_tokens/{name}": int(num_targets), f"tokens/{name}": int(num_tokens)}
        self._write(row)
        shown = "  ".join(self._shown(row))
        text = f"{shown}  lr {row['learning_rate']:.2e}  {speed_text(row)}"
        if self.bar is not None:
            self.bar.set_postfix_str(text)
        elif self.state.elapsed_seconds - self.last_line >= QUIET_SECONDS or step in (1, self.total_steps):
            self.last_line = self.state.elapsed_seconds
            left = self.throughput.seconds_of(self.total_steps - step)
            say(f"step {step}/{self.total_steps}  {text}" + (f"  {left:,.0f} s of training left" if left else ""))

    def _log_skipped_step(self, step: int, batch: "GlobalBatch", result: "StepResult") -> None:
        """Log a step without an update. Its values are logged as strings, because JSON has no NaN."""
        if not self.is_main:
            return
        samples = [redacted(origin) for origin in batch.origins]
        self._write({"step": step, "epoch": batch.epoch, "nonfinite": result.values, "samples": samples})
        if self.state.nonfinite_steps <= self.recipe.max_nonfinite_steps:
            text = f"step {step}: {result.values}: skipped, weights unchanged"
            say(f"warning: {text}; samples: {by_file(batch.origins)}")

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Log an evaluation after ``step`` steps: its metrics, and its answers if there are any."""
        row: dict[str, Any] = {"step": step, **evaluation.metrics, **evaluation.counts}
        row |= {"tokens_seen": self.state.tokens_seen, "seconds": self.state.elapsed_seconds}
        row |= {"details": evaluation.details} if evaluation.details else {}
        if evaluation.intervals:
            row["intervals"] = evaluation.intervals
        if evaluation.answers:
            row["answers"] = [_as_row(answer) for answer in evaluation.answers]
        if evaluation.odd_samples:
            row["samples"] = [redacted(origin) for origin in evaluation.odd_samples]
        if self.is_main:
            self._write(row)
        share = ", ".join(
            f"{name.removeprefix('eval_').replace('_', ' ')} {_measured(name, evaluation.metrics[name])}"
            f" (95 % interval {_measured(name, low)} to {_measured(name, high)})"
            for name, (low, high) in evaluation.intervals.items()
        )
        share = f", generated answers: {share}" if share else ""
        shown = ", ".join(self._shown(evaluation.metrics, "eval_"))
        say(f"evaluation after {step} steps: {shown}{share}")
        doubts = evaluation.doubts()
        metric = self.recipe.metric_for_best_model
        if metric not in evaluation.metrics and metric != "eval_loss" and self.state.evaluated_step < 0:
            why = "the evaluation data have desirable completions only, or undesirable ones only"
            doubts.append(f"no {metric}, since {why}: no best evaluation, and no early stopping")
        if step:  # before training, the model may not know when to stop
            doubts += truncated_answers(row, self.recipe, evaluation.stops)
        doubts += missing_prompts(row) if self.state.evaluated_step < 0 else []
        say(*(f"warning: {doubt}" for doubt in doubts))
        for answer in evaluation.answers[:1]:  # metrics.jsonl has more
            say(f"    prompt   {_one_line(answer.prompt)}")
            if answer.reference is not None:
                say(f"    expected {_one_line(answer.reference)}")
            differs = "" if answer.exact or answer.reference is None else "   (differs)"
            say(f"    answer   {_one_line(answer.text)}{differs}")
        self.throughput.skip_time()

    def summary(self) -> list[str]:
        """Return lines for the end of the run: first and last evaluation, and the best checkpoint."""
        first = self.state.first_evaluation
        last = self.state.current_evaluation  # an evaluation of an earlier start does not count
        lines = []
        if first != last:
            names = [name for name in last if name in first and not name.startswith(OF_THE_DATA)]
            begin = self.state.first_evaluated_step  # 0: the base
            after = f" (after step {begin})" if begin > 0 else ""
            lines = [f"{name}: {first[name]:.4f}{after} -> {last[name]:.4f}" for name in names]
        best, metric = self.state.best, self.recipe.metric_for_best_model
        if self._follows_evaluations and metric in best and best["step"]:  # of step 0 there is no checkpoint
            which = "lowest" if metric == "eval_loss" else "highest"
            kept = "; as a model:" if self.recipe.keep_best else ""
            lines.append(f"{which} {metric}: {best[metric]:.4f} after step {best['step']}{kept}")
            if kept:
                path = self.path.parent / "checkpoints" / name_of(best["step"])
                lines.append(f"    {command_of('export.py')} {shlex.quote(str(path))} --output_dir best")
        return lines

    def end(self, stopped: str, notes: Sequence[str] = ()) -> None:
        """Close the progress bar and the trackers, and print how the run ended.

        Args:
            stopped: what stopped the run, for example "a signal"; empty if nothing did.
            notes: lines of the feed about the data.
        """
        if self.bar is not None:
            self.bar.close()
        if self.recipe.report_to:
            for tracker in self.accelerator.trackers:
                tracker.finish()
        if stopped:
            step = self.state.step
            saved = f"after step {step} of {self.total_steps}, and saved" if step else "before the first step"
            say(f"stopped by {stopped} {saved}: the same command continues")
        else:
            early = self.state.early_stop_reason(self.recipe, self.total_steps)
            ended = [f"ended early, after step {self.state.step} of {self.total_steps}: {early}"] if early else []
            run = self.path.parent
            talk = [f"chat with it: kit chat {shlex.quote(str(run))}"] if self.recipe.declared.head == "lm" else []
            say(*ended, *notes, *self.summary(), f"model: {run / 'final'}", *talk)

    @property
    def _follows_evaluations(self) -> bool:
        """Whether anything depends on ``metric_for_best_model``."""
        return self.recipe.keep_best or self.recipe.early_stopping_patience is not None

    def _shown(self, row: Mapping[str, Any], prefix: str = "") -> list[str]:
        """Title and value of each metric that there is; ``prefix`` begins their keys."""
        metrics = [each for each in (*_SHOWN, *self.recipe.declared.metrics) if each.title and prefix + each.key in row]
        return [f"{each.title} {row[prefix + each.key]:{each.digits}}" for each in metrics]

    def _write(self, row: dict[str, Any]) -> None:
        """Write a line of JSON, which has no NaN: such a value, as an objective's metric may have, is left out."""
        row = {key: value for key, value in row.items() if not (isinstance(value, float) and not math.isfinite(value))}
        with durable.open_to_append(self.path) as file:
            file.write(json.dumps(row) + "\n")
        if self.recipe.report_to:
            track(self.accelerator, row)


def _as_row(answer: Answer) -> dict[str, Any]:
    """An answer in ``metrics.jsonl``."""
    texts = {name: text for name in ("prompt", "reference", "text") if (text := getattr(answer, name)) is not None}
    exact = {} if answer.reference is None else {"exact": answer.exact}
    more = {"conversation": redacted(answer.conversation), "reward": answer.reward, "pictures": answer.pictures}
    return {
        **{name: redacted(text) for name, text in texts.items()},
        **exact,
        **{name: value for name, value in more.items() if value not in ("", None, [])},
    }


def _measured(name: str, value: float) -> str:
    """The value of a generation metric: the kit's are fractions, the user's may be anything."""
    return f"{value:.1%}" if is_share(name) else f"{value:.4g}"


def _drop_lines_after(path: Path, step: int, evaluated_step: int) -> list[dict[str, Any]]:
    """Delete the lines of later steps than ``step`` from ``metrics.jsonl``: a resumed run repeats these steps.

    Args:
        step: of the checkpoint.
        evaluated_step: of the last evaluation at the checkpoint; lines of later evaluations are deleted.

    Returns:
        The remaining rows of ``step`` itself.
    """
    lines: list[str] = []
    kept: list[dict[str, Any]] = []
    with durable.open_regular(path) as file:
        for line in file if step else ():
            row = metrics_row(line) if line.endswith(b"\n") else None  # None: a kill cut it off
            if row is None or row["step"] > step:
                continue
            if row["step"] == step:
                if evaluated_step < step and is_evaluation(row):
                    continue
                kept.append(row)
            lines.append(line.decode())
    durable.write_text(path, "".join(lines))
    return kept


def _one_line(text: str) -> str:
    text = redacted(" ".join(text.split()))  # before the text is cut: half a credential would not be recognised
    return text if len(text) <= 160 else f"{text[:78]} ... {text[-78:]}"
