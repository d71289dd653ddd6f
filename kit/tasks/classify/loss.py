"""The objectives of a classifier and of regression, as transformers' ``problem_type`` defines them."""

from collections.abc import Sequence

import numpy as np
import pandas
import torch
import torch.nn.functional as F

from kit.config.recipe import Recipe
from kit.data.feed.batches import MicroBatch
from kit.data.feed.feed import GlobalBatch
from kit.data.samples.dataset import Dataset
from kit.strategy.float64 import in_float64
from kit.tasks.base import Evaluated, MeanLoss
from kit.tasks.classify.labels import with_labels
from kit.train.step_loss import Terms

MOST_CONFUSIONS = 50  # kept of an evaluation


class Classification(MeanLoss):
    """Cross-entropy of a text's label; multi-label: the mean of the binary cross-entropies of all labels, as
    transformers' ``problem_type`` defines both."""

    @classmethod
    def resolve(cls, recipe: Recipe, datasets: Sequence[Dataset]) -> Recipe:
        """See ``Objective.resolve``: its labels."""
        return with_labels(recipe, datasets) if datasets else recipe

    @property
    def has_several(self) -> bool:
        """Whether a text may have any number of labels."""
        return self.settings.problem_type == "multi_label_classification"

    def terms(self, losses: torch.Tensor, micro_batch: MicroBatch) -> Terms:
        """See ``Objective.terms``; the numbers are the loss, how many texts are right, and of each label how many
        have it and are given it, have it, and are given it: [3, C]."""
        scores = in_float64(losses)  # [n, C]
        numbers = self._labels(micro_batch, scores)
        wanted = torch.zeros(len(scores), scores.shape[1] + 1).to(scores).scatter_(1, numbers, 1)[:, :-1]  # [n, C]
        if self.has_several:
            term = F.binary_cross_entropy_with_logits(scores, wanted, reduction="sum") / scores.shape[1]
            found = (scores.detach() > 0).to(scores)
        else:
            term = F.cross_entropy(scores, numbers[:, 0], reduction="sum")
            found = torch.zeros_like(wanted).scatter_(1, scores.detach().argmax(dim=1, keepdim=True), 1)
        right = (found == wanted).all(dim=1).sum()
        of_labels = [each.sum(dim=0) for each in (wanted * found, wanted, found)]
        return [term], torch.cat([torch.stack([term.detach(), right.to(scores)]), *of_labels])

    def _labels(self, micro_batch: MicroBatch, scores: torch.Tensor) -> torch.Tensor:
        """The ids of the labels that texts have, int64 [n, L]; C for none."""
        return micro_batch.per_sequence["values"].to(scores.device).nan_to_num(scores.shape[1]).long()

    def sample_values(self, losses: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the label and the predicted label of each text, float64 [n, 2]."""
        scores = in_float64(losses)
        return torch.stack([self._labels(micro_batch, scores)[:, 0], scores.argmax(dim=1)], dim=1).to(scores)

    def metrics(self, sums: list[float], batch: GlobalBatch) -> dict[str, float]:
        """Return ``loss``, ``accuracy``, the mean ``f1`` of the labels, and ``f1/<name>`` of each that occurs."""
        right, wanted, found = np.array(sums[2:]).reshape(3, -1)
        f1 = 2 * right / np.maximum(wanted + found, 1)  # of a label that is nowhere 0, as in scikit-learn
        occurs = np.flatnonzero(wanted + found).tolist()
        metrics = {"loss": sums[0] / batch.num_samples, "accuracy": sums[1] / batch.num_samples, "f1": float(f1.mean())}
        return metrics | {f"f1/{self.settings.scores[i]}": float(f1[i]) for i in occurs}

    def of_samples(self, seen: np.ndarray) -> Evaluated:
        """Return for the report the most frequent confusions: label, predicted label, number of texts.

        Multi-label has none.

        Args:
            seen: what ``sample_values`` returns, of all samples.
        """
        if self.has_several:
            return {}, {}
        counts = pandas.DataFrame(seen[seen[:, 0] != seen[:, 1]].astype(int)).value_counts().head(MOST_CONFUSIONS)
        return {}, {"confusions": [[*(self.settings.scores[i] for i in both), num] for both, num in counts.items()]}


class Regression(Classification):
    """Mean squared error of a text's numbers, of several their mean: transformers' ``problem_type`` regression."""

    metrics = MeanLoss.metrics

    def sample_values(self, losses: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the numbers of each text, and then the predicted ones, float64 [n, 2 C]."""
        scores = in_float64(losses)
        return torch.cat([micro_batch.per_sequence["values"].to(scores), scores], dim=1)

    def terms(self, losses: torch.Tensor, micro_batch: MicroBatch) -> Terms:
        """See ``Objective.terms``; the number is the loss."""
        wanted, scores = self.sample_values(losses, micro_batch).chunk(2, dim=1)
        term = F.mse_loss(scores, wanted, reduction="sum") / len(self.settings.scores)
        return [term], term.detach()[None]

    def of_samples(self, seen: np.ndarray) -> Evaluated:
        """Return the correlations of the numbers with the predicted ones, of several numbers the mean.

        NaN if all numbers are equal, or one is NaN.
        """
        table, num = pandas.DataFrame(seen), seen.shape[1] // 2
        return {each: np.diagonal(table.corr(each, len(seen)), num).mean() for each in ("pearson", "spearman")}, {}
