"""Objectives: from the losses of single tokens to the loss of a step, and its metrics.

The setting ``objective`` names one (``kit.tasks.objectives``). What is minimised must be a sum over the targets of the
global batch, divided by a number that every rank knows before the step; or several such terms, added. Then it does not
depend on how the batch is divided into micro-batches and ranks. A mean of means would.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from accelerate.utils import gather_object

from kit.config.recipe import Recipe
from kit.data.feed.batches import MicroBatch, on_device
from kit.data.feed.feed import BatchSource, GlobalBatch, counted
from kit.data.feed.mismatched import Mismatched
from kit.data.open import pad_id
from kit.data.samples.dataset import Dataset
from kit.data.samples.records import Table
from kit.data.samples.samples import Samples
from kit.run.run import Run
from kit.system import phases
from kit.train.policy import Policy
from kit.train.precompute import add_references
from kit.train.step_loss import StepLoss

# Gives this rank's micro-batches of all rows, with a progress bar that has this name.
Batches = Callable[[Table, str], Iterable[MicroBatch]]
Evaluated = tuple[dict[str, float], dict[str, Any]]


class Measured(NamedTuple):
    """What an objective measures on evaluation data, the same on every rank."""

    metrics: dict[str, float]
    odd_samples: list[str]  # the origins of the samples in micro-batches with a NaN or Inf loss
    details: dict[str, Any]  # for the report


class Objective(StepLoss):
    """The loss of a task, with its part in a run. ``StepLoss`` has the interface of a step.

    A run calls ``open``, ``bind`` and ``open_feed`` once each. Its ``TaskSpec`` has what must be known before model and
    data are opened.
    """

    @classmethod
    def resolve(cls, recipe: Recipe, datasets: Sequence[Dataset]) -> Recipe:
        """Return the recipe with the settings that follow from the model or the data.

        Args:
            datasets: of the training and the evaluation; none if they could not be opened.

        Raises:
            UserError: they do not go together.
        """
        return recipe

    @classmethod
    def open(cls, run: Run) -> Self:
        """Create the objective of a run, before its model is on the device. Called by all ranks."""
        return cls(run.checked.data.dataset_names, run.checked.recipe)

    def bind(self, policy: Policy, run: Run) -> None:
        """Take what the objective needs of the model, whose weights are those that the run starts from.

        Here, if there is a reference model, its log-probabilities, unless it is the base of an adapter. Called by all
        ranks; raises as ``add_references``.
        """
        checked, recipe = run.checked, run.checked.recipe
        if recipe.precomputes_reference:
            run.enter(phases.REFERENCE)
            add_references(policy, recipe, checked.data, checked.total_steps, run.progress)

    def open_feed(self, policy: Policy, run: Run) -> BatchSource:
        """Open the global batches from the step on with which the run continues: here those of the data."""
        recipe, of_ranks = run.checked.recipe, (policy.ranks, pad_id(policy.tokenizer))
        return run.checked.data.open_feed(recipe, *of_ranks, run.state.feed, recipe.output_dir)

    def measure(self, policy: Policy, samples: Samples, mismatched: Mismatched | None, batches: Batches) -> Measured:
        """Measure evaluation data. Called by all ranks, without gradients.

        Args:
            mismatched: of an objective that needs it.
        """
        common = self.evaluation_values(policy, mismatched, len(samples), batches)
        whole = counted(samples, np.arange(len(samples)), len(samples.stores))
        total: Any = 0.0
        are_finite, numbers, seen = [], [], []  # of each micro-batch, with the numbers of its samples
        for micro_batch in on_device(batches(samples, "evaluation loss"), policy.accelerator.device):
            known = {name: value.expand(len(micro_batch.segments)) for name, value in common.items()}
            one = replace(whole, micro_batches=[micro_batch.with_per_sequence(**known)])
            (batch,) = self.begin_step(policy, one).micro_batches
            outputs = policy.model(**batch.model_inputs())
            part = self.terms(outputs, batch)[1]
            total = total + part
            are_finite.append(part.isfinite().all())
            numbers.append(list(dict.fromkeys(number for *_, number in batch.segments)))
            seen.append(self.sample_values(outputs, batch))
        metrics = self.evaluation_metrics(policy.ranks.sum(total).tolist(), whole)
        own = torch.cat(seen)
        details: dict[str, Any] = {}
        if own.shape[1]:
            at = torch.tensor([i for each in numbers for i in each], dtype=torch.long, device=own.device)
            of_samples = own.new_zeros(len(samples), own.shape[1]).index_copy(0, at, own)
            more, details = self.of_samples(policy.ranks.sum(of_samples).cpu().numpy())
            metrics |= more
        odd: list[int] = []
        if not math.isfinite(metrics["loss"]):
            odd = [i for batch, is_finite in zip(numbers, are_finite, strict=True) if not is_finite for i in batch]
            odd = sorted(set(gather_object(odd)))
        return Measured(metrics, list(map(samples.origin, odd)), details)

    def evaluation_values(
        self, policy: Policy, mismatched: Mismatched | None, num_samples: int, batches: Batches
    ) -> dict[str, torch.Tensor]:
        """Return values of the whole evaluation data, each [], which ``terms`` finds in ``per_sequence``."""
        return {}

    def evaluation_metrics(self, sums: list[float], whole: GlobalBatch) -> dict[str, float]:
        """Compute the metrics of evaluation data; as ``metrics``, of all samples as one batch."""
        return self.metrics(sums, whole) | {"tokens": int(whole.num_targets.sum())}

    def sample_values(self, losses: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """Return what ``of_samples`` needs of each sample, float64 [n, k]; the arguments are those of ``terms``."""
        return losses.new_zeros(0, 0)

    def of_samples(self, seen: np.ndarray) -> Evaluated:
        """Return metrics of an evaluation that are no sums over samples, and what the report shows about it.

        Args:
            seen: what ``sample_values`` returns, of all samples.
        """
        return {}, {}


class MeanLoss(Objective):
    """A mean over the samples of the global batch."""

    def divisors(self, batch: GlobalBatch) -> Sequence[float]:
        """Return the number of samples."""
        return [batch.num_samples]

    def metrics(self, sums: list[float], batch: GlobalBatch) -> dict[str, float]:
        """Return ``loss``, whose sum is the first number of ``terms``."""
        return {"loss": sums[0] / batch.num_samples}
