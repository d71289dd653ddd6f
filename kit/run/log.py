"""What a person sees and what a tool reads: progress bar, ``metrics.jsonl``, trackers. The main process only, inside.

Every rank calls the same methods; the gating is here, so that no caller has to ask which process it is.
"""

import json
import logging
import math
import resource
import shlex
import statistics
import sys
import time
import uuid
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tqdm import tqdm

from kit.checkpoint.load import name_of
from kit.data.feed.feed import by_file
from kit.secrets import redacted
from kit.strategy.launch import is_main, unheard

if TYPE_CHECKING:
    from accelerate import Accelerator

    from kit.config.recipe import Recipe
    from kit.data.feed.feed import GlobalBatch
    from kit.evaluate import Evaluation
    from kit.train.step import StepResult

SECONDS_BETWEEN_LINES = 5.0
RECENT_STEPS, FEWEST_LOSSES = 50, 10  # that a spike is compared with

# Third-party messages no user can act on: deprecations between libraries, and remarks on what the kit does on purpose.
_SILENCED_MESSAGES = (
    ".*is_gradient_checkpointing.*deprecated.*",
    ".*torch.distributed is disabled, unavailable or uninitialized.*",
    ".*Please use DTensor instead.*",
    ".*FSDP.state_dict_type.*",
    ".*TypedStorage is deprecated.*",
)
_SILENCED_LOGGERS = ("bitsandbytes", "torch.distributed.fsdp._state_dict_utils", "torch.distributed.elastic")


def silence_libraries() -> None:
    """Keep warnings a user can act on; call before models are touched."""
    for message in _SILENCED_MESSAGES:
        warnings.filterwarnings("ignore", message=message)
    for name in _SILENCED_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()


def progress(items: Iterable[Any], name: str, total: int) -> Iterable[Any]:
    """``items`` with a bar of their own, on the main process and where standard error is a terminal."""
    visible = is_main() and sys.stderr.isatty()
    return tqdm(items, desc=name, total=total, leave=False, dynamic_ncols=True, disable=not visible)


def new_state() -> dict[str, Any]:
    """What a checkpoint keeps of the loop, before the first step."""
    return {
        "step": 0,
        "feed": {},
        "evaluated_step": -1,
        "first_evaluation": {},
        "last_evaluation": {},
        "best": {},  # step and eval_loss of the lowest
        "nonfinite_steps": 0,  # skipped in a row
        "recent_losses": [],
        "tracker_id": "",
        "seconds": 0.0,
    }


class Log:
    """Progress and metrics of one run, from ``state["step"]`` to ``total_steps``."""

    def __init__(
        self,
        accelerator: "Accelerator",
        recipe: "Recipe",
        output_dir: Path,
        state: dict[str, Any],
        total_steps: int,
        source_names: list[str],
    ) -> None:
        self.accelerator, self.recipe = accelerator, recipe
        self.is_main = accelerator.is_main_process
        self.total_steps, self.source_names = total_steps, source_names
        self.last_time = time.perf_counter()
        self.started = self.last_time - state["seconds"]
        self.last_line = 0.0
        self.tokens = self.steps = 0
        self.training_seconds = 0.0
        self.first_evaluation: dict[str, float] = state["first_evaluation"]
        self.last_evaluation: dict[str, float] = state["last_evaluation"]
        self.evaluated_step: int = state["evaluated_step"]
        self.best: dict[str, Any] = state["best"]
        self.nonfinite_steps: int = state["nonfinite_steps"]
        self.recent_losses: deque[float] = deque(state["recent_losses"], maxlen=RECENT_STEPS)
        self.tracker_id: str = state["tracker_id"] or (uuid.uuid4().hex[:8] if recipe.report_to else "")
        self.path = output_dir / "metrics.jsonl"
        self.bar: Any = None
        kept = []
        if self.is_main:
            self.path.touch()
            kept = _drop_lines_after(self.path, state["step"], self.evaluated_step)
            if sys.stderr.isatty():
                self.bar = tqdm(initial=state["step"], total=total_steps, unit="step", dynamic_ncols=True)
        if recipe.report_to:
            has_begun = (output_dir / "kit").exists()  # TensorBoard's: its settings stand there once
            accelerator.init_trackers("kit", init_kwargs=self._same_curves(state["step"]))
            for tracker in accelerator.trackers:
                if tracker.name != "tensorboard" or not has_begun:
                    tracker.store_init_configuration(_flat(recipe.model_dump()))
                if tracker.name == "tensorboard":
                    for row in kept:
                        tracker.log(_numbers(row), step=row["step"])

    def say(self, *lines: str) -> None:
        """Lines for the user, without breaking the bar."""
        if self.is_main:
            with unheard():
                for line in lines:
                    tqdm.write(redacted(line), file=sys.stdout)
                sys.stdout.flush()

    def step(self, step: int, batch: "GlobalBatch", result: "StepResult", learning_rate: float) -> None:
        """After 1-based ``step``; counts of tokens are over all ranks."""
        metrics: dict[str, float] = {
            "epoch": batch.epoch,
            "loss": result.loss,
            "learning_rate": learning_rate,
            "grad_norm": result.grad_norm,
            "supervised_tokens": int(batch.num_targets.sum()),
            "tokens": int(batch.num_tokens.sum()),
        }
        self.tokens += int(metrics["tokens"])
        self.steps += 1
        num_losses, ratio = len(self.recent_losses), self.recipe.loss_spike_ratio
        usual = statistics.median(self.recent_losses) if num_losses >= FEWEST_LOSSES else math.inf
        is_spike = bool(ratio) and result.loss > ratio * usual
        self.nonfinite_steps = 0 if result.is_finite else self.nonfinite_steps + 1
        if result.is_finite:
            self.recent_losses.append(result.loss)
        if not self.is_main:
            return
        if self.bar is not None:
            self.bar.update(1)
        if not result.is_finite:
            self._skipped(step, batch, result)
            return
        if is_spike:
            found = f"step {step}: loss {result.loss:.4f} is {result.loss / usual:.1f} times the median of the last"
            self.say(f"warning: {found} {num_losses} steps; samples: {by_file(batch.origins)}")
            metrics["loss_spike"] = result.loss / usual
        elif step % self.recipe.logging_steps and step != self.total_steps:
            return
        now = time.perf_counter()
        rate = self.tokens / max(now - self.last_time, 1e-9)
        self.training_seconds += now - self.last_time
        self.tokens, self.last_time = 0, now
        row: dict[str, Any] = {"step": step, **metrics, "tokens_per_second": rate, "seconds": self.seconds}
        row["peak_memory_bytes"] = memory = _peak_memory_bytes()
        row |= {name: count for name, count in batch.counts.items() if count}
        row |= {"samples": [redacted(origin) for origin in batch.origins]} if is_spike else {}
        if len(self.source_names) > 1:
            columns = zip(self.source_names, result.losses, batch.num_targets, batch.num_tokens, strict=True)
            for name, loss, num_targets, num_tokens in columns:
                row |= {f"loss/{name}": loss} if num_targets else {}
                row |= {f"supervised_tokens/{name}": int(num_targets), f"tokens/{name}": int(num_tokens)}
        self._write(row)
        text = f"loss {row['loss']:.4f}  lr {row['learning_rate']:.2e}  {rate:,.0f} tok/s  {memory / 2**30:.1f} GiB"
        if self.bar is not None:
            self.bar.set_postfix_str(text)
        elif now - self.last_line >= SECONDS_BETWEEN_LINES or step in (1, self.total_steps):
            self.last_line = now
            left = self.training_seconds / self.steps * (self.total_steps - step)
            self.say(f"step {step}/{self.total_steps}  {text}  {left:,.0f} s left")

    def _skipped(self, step: int, batch: "GlobalBatch", result: "StepResult") -> None:
        """A step without an update; JSON has no word for NaN."""
        samples = [redacted(origin) for origin in batch.origins]
        self._write({"step": step, "epoch": batch.epoch, "nonfinite": result.values, "samples": samples})
        if self.nonfinite_steps <= self.recipe.max_nonfinite_steps:
            found = f"step {step}: {result.values}: skipped, weights are as before it"
            self.say(f"warning: {found}; samples: {by_file(batch.origins)}")

    def evaluation(self, step: int, evaluation: "Evaluation") -> bool:
        """Metrics after ``step`` steps, and a few answers if there are any. Returns whether it is the best so far."""
        self.evaluated_step, self.last_evaluation = step, evaluation.metrics
        self.first_evaluation = self.first_evaluation or evaluation.metrics
        row: dict[str, Any] = {"step": step, **evaluation.metrics}
        if evaluation.answers:
            row["answers"] = [
                {**{name: redacted(text) for name, text in asdict(answer).items()}, "exact": answer.exact}
                for answer in evaluation.answers
            ]
        if self.is_main:
            self._write(row)
        exact = evaluation.metrics.get("eval_exact_match")
        share = "" if exact is None else f", exact match {exact:.1%}"
        loss, perplexity = evaluation.metrics["eval_loss"], evaluation.metrics["eval_perplexity"]
        self.say(f"evaluation after {step} steps: loss {loss:.4f}, perplexity {perplexity:.3f}{share}")
        for answer in evaluation.answers:
            self.say(f"    asked    {_one_line(answer.prompt)}")
            self.say(f"    expected {_one_line(answer.reference)}")
            self.say(f"    answered {_one_line(answer.text)}{'' if answer.exact else '   (differs)'}")
        # Time spent evaluating is no training time.
        self.last_time = time.perf_counter()
        is_best = loss < self.best.get("eval_loss", math.inf)
        if is_best:
            self.best = {"step": step, "eval_loss": loss}
        return is_best

    def state(self, step: int, feed: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint after ``step`` steps keeps of the loop; see ``new_state``."""
        values = {"step": step, "feed": feed, "recent_losses": list(self.recent_losses)}
        return values | {name: getattr(self, name) for name in new_state() if name not in values}

    @property
    def seconds(self) -> float:
        """Since the run began, without the time between two starts and what a kill undid."""
        return time.perf_counter() - self.started

    @property
    def best_step(self) -> int | None:
        """The checkpoint to keep whatever is newer; None where it is not asked for."""
        return self.best.get("step") if self.recipe.keep_best else None

    def summary(self) -> list[str]:
        """First and last evaluation, a line for each measure."""
        first, last, lines = self.first_evaluation, self.last_evaluation, []
        if first != last:
            names = [name for name in last if name in first and not name.startswith("eval_tokens")]
            lines = [f"{name}: {first[name]:.4f} -> {last[name]:.4f}" for name in names]
        if self.best_step:
            path = self.path.parent / "checkpoints" / name_of(self.best_step)
            lines.append(f"lowest eval_loss: {self.best['eval_loss']:.4f} after step {self.best_step}; as a model:")
            lines.append(f"    python recipes/export.py {shlex.quote(str(path))} --output_dir best")
        return lines

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.recipe.report_to:
            for tracker in self.accelerator.trackers:
                tracker.finish()

    def _same_curves(self, step: int) -> dict[str, Any]:
        """What makes trackers go on with the curves of a resumed run instead of beginning others."""
        again = {"id": self.tracker_id, "resume": "allow"}
        # TensorBoard hides what was logged after the checkpoint, and is run again. Of the checkpoint's own step an
        # evaluation may be run again too: all of that step is hidden, and what stands of it is told once more.
        purged = {"purge_step": step}
        return {"wandb": again, "trackio": {"name": self.tracker_id, "resume": "allow"}, "tensorboard": purged}

    def _write(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self.recipe.report_to:
            self.accelerator.log(_numbers(row), step=int(row["step"]))


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "step" and isinstance(value, int | float)}


def _drop_lines_after(path: Path, step: int, evaluated_step: int) -> list[dict[str, Any]]:
    """A resumed run repeats what came after its checkpoint: those lines go, so that each stands once.

    Returns:
        The rows of ``step`` itself that stay.
    """
    kept, of_step = [], []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            if step and row["step"] <= (evaluated_step if "eval_loss" in row else step):
                kept.append(line)
                of_step += [row] if row["step"] == step else []
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # cut off by a kill
    temporary = path.with_suffix(".partial")
    temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    temporary.replace(path)
    return of_step


def _peak_memory_bytes() -> int:
    """Of this process: allocated on its GPU, or resident where there is none."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _one_line(text: str) -> str:
    text = redacted(" ".join(text.split()))  # before part of one is cut off
    return text if len(text) <= 160 else f"{text[:78]} ... {text[-78:]}"


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Trackers take plain values only."""
    return {key: value if isinstance(value, int | float | str | bool) else str(value) for key, value in values.items()}
