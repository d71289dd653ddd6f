"""Objectives: how the losses of single tokens become the number that a step minimises, and its metrics.

The setting ``objective`` names one (``kit.tasks.objectives``). What is minimised must be a sum over the targets of the
global batch, divided by a number that every rank knows before the step; or several such terms, added. Then it does not
depend on how the batch is divided into micro-batches and ranks. A mean of means would.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from accelerate.utils import gather_object

from kit.config.recipe import Recipe
from kit.config.settings.objective import ObjectiveSettings
from kit.data.feed.batches import MicroBatch, on_device
from kit.data.feed.feed import BatchSource, GlobalBatch, counted
from kit.data.feed.mismatched import Mismatched
from kit.data.open import pad_id
from kit.data.samples.dataset import Dataset
from kit.data.samples.records import Table
from kit.data.samples.samples import Samples
from kit.strategy.accelerator import Prepared
from kit.train.policy import Policy

if TYPE_CHECKING:
    from kit.run.run import Run

# What ``Objective.terms`` returns.
Terms = tuple[Sequence[torch.Tensor], torch.Tensor]
# Gives this rank's micro-batches of all rows, with a progress bar that has this name.
Batches = Callable[[Table, str], Iterable[MicroBatch]]


class Measured(NamedTuple):
    """What an objective measures on evaluation data, the same on every rank."""

    metrics: dict[str, float]
    odd_samples: list[str]  # where the samples are from of micro-batches whose losses are not finite
    details: dict[str, Any]  # what a report shows


@dataclass
class Objective:
    """What a step minimises: one or more terms, each a sum over the global batch divided by its own divisor.

    A run calls ``open``, ``bind`` and ``open_feed`` once each. ``train_step`` calls, in this order: ``begin_step``
    once, ``divisors`` once, ``terms`` for each micro-batch, and ``metrics`` once. An objective keeps nothing between
    two steps, so that a run can continue from any of them. Its ``TaskSpec`` has what must be known before model and
    data are opened. What is defined here is of an objective over the cross-entropy of each target, without a pass
    before the step.

    Attributes:
        dataset_names: the names of the training data sets, by their index in ``MicroBatch.dataset_ids``.
        target_values: None: ``terms`` gets the cross-entropy of each target, which is all that most objectives need.

            Else a method ``target_values(self, micro_batch, logits, rows)``: ``terms`` gets its values instead, float32
            [C] or [C, K]. It computes them from the logits, float32 [C, V], of some targets of ``micro_batch``: those
            of the slice ``rows``. The loss head calls it for one chunk after another, because the logits of all targets
            would not fit. So the values of a target depend on no logits but its own, and C may be 0. Evaluations do not
            call it.

            Price: memory for each tensor [C, V] that it makes; and under a frozen head the logits are computed twice.
    """

    dataset_names: Sequence[str]
    settings: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    target_values: ClassVar[Callable[..., torch.Tensor] | None] = None

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
    def open(cls, run: "Run") -> Self:
        """Create the objective of a run, before its model takes the device. Called by all ranks."""
        return cls(run.checked.data.dataset_names, run.checked.recipe)

    def bind(self, policy: Policy, run: "Run") -> None:
        """Take what the objective needs of the model, whose weights are those that the run starts from: here nothing.

        Called by all ranks.
        """

    def open_feed(self, policy: Policy, run: "Run") -> BatchSource:
        """Open the global batches from the step on with which the run continues: here those of the data."""
        recipe, of_ranks = run.checked.recipe, (policy.ranks, pad_id(policy.tokenizer))
        return run.checked.data.open_feed(recipe, *of_ranks, run.state.feed, recipe.output_dir)

    def begin_step(self, prepared: Prepared, batch: GlobalBatch) -> GlobalBatch:
        """Return the batch to train on, with what the terms need beside it. Called by all ranks.

        Here an objective makes a pass without gradients, such as that of a reference model, and returns the batch with
        micro-batches that hold its result. All ranks must call the model the same number of times.
        """
        return batch

    def divisors(self, batch: GlobalBatch) -> Sequence[float]:
        """Return for each term the number that divides its sum over the global batch; the same on every rank."""
        raise NotImplementedError

    def terms(self, losses: torch.Tensor, micro_batch: MicroBatch) -> Terms:
        """Compute the part of one micro-batch.

        Args:
            losses: float32 [S], the cross-entropy of each target of ``micro_batch``, in nats: ``-losses`` are the
                log-probabilities of the targets. With ``target_values`` its values instead, float32 [S] or [S, K]. The
                auxiliary loss of routers is not in them: ``train_step`` adds it to what is minimised. Of a head in the
                place of words what it computes of each target, float32 [S, ...].

        Returns:
            For each term its part of the sum, shape [], to be differentiated; and numbers for the metrics, float64 [n],
            detached (``in_float64``), which are summed over the micro-batches of all ranks.
        """
        raise NotImplementedError

    def metrics(self, sums: list[float], batch: GlobalBatch) -> dict[str, float]:
        """Compute the metrics of the step.

        Args:
            sums: the n numbers of ``terms``, summed over the global batch.

        Returns:
            The metrics by name; ``loss`` is the number that was minimised, without the auxiliary loss of routers.
        """
        raise NotImplementedError

    def measure(self, policy: Policy, samples: Samples, mismatched: Mismatched | None, batches: Batches) -> Measured:
        """Measure evaluation data. Called by all ranks, without gradients.

        Args:
            mismatched: beside rows that have it.
        """
        common = self.of_evaluation(policy, mismatched, len(samples), batches)
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
            seen.append(self.seen(outputs, batch))
        metrics = self.evaluation_metrics(policy.ranks.sum(total).tolist(), whole)
        own = torch.cat(seen)
        details = {}
        if own.shape[1]:
            at = torch.tensor([i for each in numbers for i in each], dtype=torch.long, device=own.device)
            of_samples = own.new_zeros(len(samples), own.shape[1]).index_copy(0, at, own)
            details = self.details(policy.ranks.sum(of_samples).cpu().numpy())
        odd: list[int] = []
        if not math.isfinite(metrics["loss"]):
            odd = [i for batch, is_finite in zip(numbers, are_finite, strict=True) if not is_finite for i in batch]
            odd = sorted(set(gather_object(odd)))
        return Measured(metrics, list(map(samples.origin, odd)), details)

    def of_evaluation(
        self, policy: Policy, mismatched: Mismatched | None, num_samples: int, batches: Batches
    ) -> dict[str, torch.Tensor]:
        """Return numbers of the evaluation data as a whole, each [], which ``terms`` finds in ``per_sequence``."""
        return {}

    def evaluation_metrics(self, sums: list[float], whole: GlobalBatch) -> dict[str, float]:
        """Compute the metrics of evaluation data; as ``metrics``, of all samples as one batch."""
        return self.metrics(sums, whole) | {"tokens": int(whole.num_targets.sum())}

    def seen(self, losses: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """Return what ``details`` needs of each sample, float64 [n, k]; the arguments are those of ``terms``."""
        return losses.new_zeros(0, 0)

    def details(self, seen: np.ndarray) -> dict[str, Any]:
        """Return what a report shows of an evaluation.

        Args:
            seen: what ``seen`` returns, of all samples.
        """
        return {}


class MeanLoss(Objective):
    """A mean over the samples of the global batch."""

    def divisors(self, batch: GlobalBatch) -> Sequence[float]:
        """Return the number of samples."""
        return [batch.num_samples]
