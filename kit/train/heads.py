"""Objectives of a head in the place of words: rewards of answers, labels of texts, and embeddings.

The model returns scores of the last token of each sequence, or the states that are pooled to an embedding; see
``kit.model.pretrained``. Each loss is a sum over pairs, texts or anchors, divided by their number in the global batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from xxhash import xxh3_64_intdigest

from kit.data.feed.batches import on_device
from kit.strategy.float64 import in_float64
from kit.train.objective_base import ObjectiveBase
from kit.train.reference import without_gradients

if TYPE_CHECKING:
    from kit.data.feed.batches import MicroBatch
    from kit.data.feed.feed import GlobalBatch
    from kit.strategy.accelerator import Prepared

RETRIEVED = 10  # documents that nDCG and recall look at
RETRIEVAL = (f"ndcg_at_{RETRIEVED}", "mrr", "recall_at_1", f"recall_at_{RETRIEVED}")
_GRADIENTS, _LOSSES = "gradients", "losses"  # of ``MicroBatch.per_sequence``: [n, h] and float64 [n]
MOST_CONFUSIONS = 50  # that an evaluation keeps
_AT_ONCE = 1024  # anchors whose similarities are computed together


class HeadLoss(ObjectiveBase):
    """A mean over the samples of the global batch."""

    def divisors(self, batch: "GlobalBatch") -> Sequence[float]:
        """Return the number of samples."""
        return [batch.num_samples]


class RewardModelling(HeadLoss):
    """-log s(r_w - r_l - m) + c (r_w + r_l)^2 of each pair, with its margin m and c = ``center_rewards_coefficient``.

    r are the rewards of the better and the worse text, and s is the logistic function. Bradley and Terry 1952, as in
    Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, equation 1; m: Touvron et al. 2023,
    https://arxiv.org/abs/2307.09288, equation 2; c: Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244.
    """

    def terms(self, losses: torch.Tensor, micro_batch: "MicroBatch") -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """See ``Objective.terms``; the numbers are the loss, and sums over pairs."""
        rewards = in_float64(losses).reshape(-1, 2)  # [P, 2]
        differences = rewards[:, 0] - rewards[:, 1]
        margins = in_float64(micro_batch.per_sequence["values"]).to(rewards)[::2, 0]
        term = -F.logsigmoid(differences - margins).sum()
        term = term + self.settings.center_rewards_coefficient * (rewards.sum(dim=1) ** 2).sum()
        with torch.no_grad():
            own = [term, (differences > 0).sum(), differences.sum(), rewards[:, 0].sum(), rewards[:, 1].sum()]
            return [term], torch.stack([each.to(differences) for each in own])

    def metrics(self, sums: list[float], batch: "GlobalBatch") -> dict[str, float]:
        """Return ``loss``, and over pairs the share with the larger reward for the better text, and means."""
        names = ("loss", "accuracy", "margin", "reward_chosen", "reward_rejected")
        return {name: value / batch.num_samples for name, value in zip(names, sums, strict=True)}


class Classification(HeadLoss):
    """Cross-entropy of a text's label; or, if it may have several, the sum of the binary ones of all labels / their
    number, as transformers' ``problem_type`` defines both."""

    @property
    def labels(self) -> list[str]:
        """The names of the labels."""
        return self.settings.labels or []

    @property
    def has_several(self) -> bool:
        """Whether a text may have any number of labels."""
        return self.settings.problem_type == "multi_label_classification"

    def terms(self, losses: torch.Tensor, micro_batch: "MicroBatch") -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """See ``Objective.terms``; the numbers are the loss, how many texts are right, and of each label how many
        have it and are given it, have it, and are given it: [3, C]."""
        scores = in_float64(losses)  # [n, C]
        numbers = self._given(micro_batch, scores)
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

    def _given(self, micro_batch: "MicroBatch", scores: torch.Tensor) -> torch.Tensor:
        """The numbers of the labels that texts have, int64 [n, L]; C for none."""
        return micro_batch.per_sequence["values"].to(scores.device).nan_to_num(scores.shape[1]).long()

    def seen(self, losses: torch.Tensor, micro_batch: "MicroBatch") -> torch.Tensor:
        """Return the number of the label that each text has, and that it is given, float64 [n, 2]."""
        scores = in_float64(losses)
        return torch.stack([self._given(micro_batch, scores)[:, 0], scores.argmax(dim=1)], dim=1).to(scores)

    def metrics(self, sums: list[float], batch: "GlobalBatch") -> dict[str, float]:
        """Return ``loss``, ``accuracy``, the mean ``f1`` of the labels, and ``f1/<name>`` of each that occurs."""
        right, wanted, found = np.array(sums[2:]).reshape(3, -1)
        f1 = 2 * right / np.maximum(wanted + found, 1)  # of a label that is nowhere 0, as in scikit-learn
        occurs = np.flatnonzero(wanted + found).tolist()
        metrics = {"loss": sums[0] / batch.num_samples, "accuracy": sums[1] / batch.num_samples, "f1": float(f1.mean())}
        return metrics | {f"f1/{self.labels[i]}": float(f1[i]) for i in occurs}

    def details(self, seen: np.ndarray) -> dict[str, Any]:
        """Return the most frequent confusions: the label of texts, the one that they are given, and how many texts.

        If a text may have several labels there are none; the ``f1`` of each label says how it goes.

        Args:
            seen: what ``seen`` returns, of all samples.
        """
        if self.has_several:
            return {}
        pairs, counts = np.unique(seen[seen[:, 0] != seen[:, 1]].astype(int), axis=0, return_counts=True)
        most = np.argsort(-counts, kind="stable")[:MOST_CONFUSIONS]
        return {"confusions": [[*(self.labels[k] for k in pairs[i]), int(counts[i])] for i in most]}


class Embedding(HeadLoss):
    """Contrastive loss (InfoNCE): of each anchor the cross-entropy of its own positive among those of all anchors of
    the global batch and all negatives, by cosine similarity / ``embed_temperature``. No negative of an anchor is the
    text of its positives, whichever row they are in, or its own text.

    van den Oord et al. 2018, https://arxiv.org/abs/1807.03748, equation 4. With ``matryoshka_dims`` the sum of it over
    embeddings cut to each of these sizes: Kusupati et al. 2022, https://arxiv.org/abs/2205.13147, equation 1.

    The loss is not a sum over micro-batches. ``begin_step`` computes all embeddings without gradients, the loss, and
    its gradient with respect to each embedding; then the term of a micro-batch is the product of both, whose gradients
    are those of the loss: Gao et al. 2021, https://arxiv.org/abs/2101.06983.
    """

    def begin_step(self, prepared: "Prepared", batch: "GlobalBatch") -> "GlobalBatch":
        """Return the batch with what each embedding is to be multiplied by. Called by all ranks."""
        micro_batches = list(on_device(batch.micro_batches, prepared.accelerator.device))
        with without_gradients(prepared):
            own = [self.embeddings(prepared.model(**each.model_inputs()), each) for each in micro_batches]
        texts = gather(prepared, micro_batches, own)
        with torch.enable_grad():
            texts.vectors.requires_grad_()
            losses = self.losses(texts)
        assert texts.vectors.grad is not None
        gradients = texts.vectors.grad / batch.num_samples
        of_texts = torch.zeros_like(texts.roles, dtype=torch.float64)
        of_texts[texts.roles == 0] = losses
        known, start = [], texts.start
        for micro_batch in micro_batches:
            rows = slice(start, start + len(micro_batch.segments))
            start = rows.stop
            known.append(micro_batch.with_per_sequence(**{_GRADIENTS: gradients[rows], _LOSSES: of_texts[rows]}))
        return replace(batch, micro_batches=known)

    def embeddings(self, states: torch.Tensor, micro_batch: "MicroBatch") -> torch.Tensor:
        """Pool states [S, h] to one vector for each sequence, float32 [n, h], whose length is not changed."""
        states = states.float()
        if self.settings.pooling == "last" or not len(micro_batch.segments):
            return states
        lengths = torch.tensor([length for _, length, _ in micro_batch.segments], device=states.device)
        return torch.segment_reduce(states, "mean", lengths=lengths)

    def measure(self, prepared: "Prepared", micro_batches: Iterable["MicroBatch"]) -> dict[str, float]:
        """Return the metrics of an evaluation, of which all anchors are one batch. Called by all ranks."""
        own, seen = [], []
        for micro_batch in on_device(micro_batches, prepared.accelerator.device):
            own.append(self.embeddings(prepared.model(**micro_batch.model_inputs()), micro_batch))
            seen.append(micro_batch)
        texts = gather(prepared, seen, own)
        return {"loss": float(self.losses(texts).mean()), **retrieval(texts)}

    def losses(self, texts: "Texts") -> torch.Tensor:
        """Return the loss of each anchor, float64 [A]; if the vectors require gradients, its sum adds to theirs."""
        vectors, roles = texts.vectors, texts.roles
        sizes = [vectors.shape[1], *(size for size in self.settings.matryoshka_dims if size < vectors.shape[1])]
        documents = torch.cat([torch.nonzero(roles == 1), torch.nonzero(roles > 1)])[:, 0]
        losses, start = [], 0
        for anchors, is_wanted, is_anchor in texts.relations(documents):
            own = torch.arange(len(anchors), device=vectors.device) + start
            start += len(anchors)
            left_out = (is_wanted | is_anchor).scatter(1, own[:, None], False)
            total = torch.zeros(len(own), dtype=torch.float64, device=vectors.device)
            for size in sizes:
                unit = F.normalize(vectors[:, :size], dim=1)
                similarities = (unit[anchors] @ unit[documents].T).masked_fill(left_out, -torch.inf)
                part = F.cross_entropy(similarities / self.settings.embed_temperature, own, reduction="none")
                if part.requires_grad:  # now, so that memory holds the similarities of one size and some anchors
                    part.sum().backward()
                total += part.detach()
            losses.append(total)
        return torch.cat(losses)

    def divisors(self, batch: "GlobalBatch") -> Sequence[float]:
        """Return 1: the gradients are those of the mean."""
        return [1.0]

    def terms(self, losses: torch.Tensor, micro_batch: "MicroBatch") -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """Return the product of the embeddings with the gradients, whose value says nothing; and the sum of losses."""
        vectors = self.embeddings(losses, micro_batch)
        gradients = micro_batch.per_sequence[_GRADIENTS].to(vectors)
        return [(vectors * gradients).sum()], micro_batch.per_sequence[_LOSSES].sum()[None]

    def metrics(self, sums: list[float], batch: "GlobalBatch") -> dict[str, float]:
        """Return ``loss``."""
        return {"loss": sums[0] / batch.num_samples}


class Texts(NamedTuple):
    """The embeddings of all ranks. Each sample's texts follow one another: its anchor, its positive, its negatives."""

    vectors: torch.Tensor  # float64 [n, h]
    roles: torch.Tensor  # int64 [n]: 0 an anchor, 1 its positive, from 2 on a negative
    keys: torch.Tensor  # int64 [n]: equal if the tokens are
    start: int  # the place of this rank's first

    def relations(self, documents: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield the places of some anchors [a], and two masks, bool [a, D]: documents that are the text of one of its
        positives, whichever sample they are from; and those that are the text of the anchor.

        Args:
            documents: int64 [D], their places.
        """
        keys, numbers = self.keys.unique(return_inverse=True)
        anchors = torch.nonzero(self.roles == 0)[:, 0]
        wanted: dict[int, list[int]] = {}
        for anchor, positive in torch.stack([numbers[anchors], numbers[self.roles == 1]], dim=1).tolist():
            wanted.setdefault(anchor, []).append(positive)
        for some in anchors.split(_AT_ONCE):
            of_rows = [wanted[anchor] for anchor in numbers[some].tolist()]
            rows = [row for row, positives in enumerate(of_rows) for _ in positives]
            is_wanted = torch.zeros(len(some), len(keys), dtype=torch.bool)
            is_wanted[rows, [number for positives in of_rows for number in positives]] = True
            is_anchor = numbers[some][:, None] == numbers[documents]
            yield some, is_wanted.to(numbers.device)[:, numbers[documents]], is_anchor


def gather(prepared: "Prepared", micro_batches: Sequence["MicroBatch"], own: Sequence[torch.Tensor]) -> Texts:
    """Gather the embeddings of all ranks. Called by all ranks.

    Args:
        own: of each micro-batch of this rank, float32 [n, h].
    """
    vectors, ranks = in_float64(torch.cat(list(own))), prepared.ranks
    roles = torch.cat([each.per_sequence["roles"] for each in micro_batches])
    keys = []
    for each in micro_batches:
        ids = each.input_ids.flatten().cpu().numpy()
        keys += [xxh3_64_intdigest(ids[at : at + length].tobytes()) >> 11 for at, length, _ in each.segments]
    about = torch.stack([roles.to(vectors), torch.tensor(keys).to(vectors)], dim=1)  # a float64 holds 53 bits exactly
    counts = torch.zeros(ranks.count, dtype=torch.float64, device=vectors.device)
    counts[ranks.index] = len(vectors)
    counts = ranks.sum(counts)
    start = int(counts[: ranks.index].sum())
    table = torch.zeros(int(counts.sum()), 2 + vectors.shape[1], dtype=torch.float64, device=vectors.device)
    table[start : start + len(vectors)] = torch.cat([about, vectors], dim=1)
    table = ranks.sum(table)
    return Texts(table[:, 2:].contiguous(), table[:, 0].long(), table[:, 1].long(), start)


def retrieval(texts: Texts) -> dict[str, float]:
    """Return how well each anchor finds its positive among all positives and negatives, by cosine similarity.

    Texts of the same tokens are one document, and an anchor that is there several times has several positives. Its own
    text is found only if it is one of them. ``mrr`` is the mean of 1 / the place of the first; ``ndcg_at_10``: Jarvelin
    and Kekalainen 2002, with gains of 1.
    """
    first: dict[int, int] = {}  # of each document the place of its first text
    for i, (key, role) in enumerate(torch.stack([texts.keys, texts.roles], dim=1).tolist()):
        if role:
            first.setdefault(key, i)
    documents = torch.tensor([*first.values()], device=texts.keys.device)
    unit = F.normalize(texts.vectors, dim=1)
    gains = 1 / torch.arange(2, 2 + min(RETRIEVED, len(documents)), dtype=torch.float64, device=unit.device).log2()
    found = []
    for anchors, is_wanted, is_anchor in texts.relations(documents):
        similarities = (unit[anchors] @ unit[documents].T).masked_fill(is_anchor & ~is_wanted, -torch.inf)
        best = similarities.masked_fill(~is_wanted, -torch.inf).max(dim=1, keepdim=True).values
        hits = is_wanted.gather(1, similarities.topk(len(gains)).indices).to(unit)  # [a, 10]
        num = is_wanted.sum(dim=1)
        ideal = gains.cumsum(0)[num.clamp(max=len(gains)) - 1]
        place = 1 + (~(similarities < best) & ~is_wanted).sum(dim=1, dtype=torch.float64)  # last of equals, and of NaN
        found.append(
            torch.stack([hits @ gains / ideal, 1 / place, *(hits[:, :k].sum(1) / num for k in (1, RETRIEVED))])
        )
    return dict(zip(RETRIEVAL, torch.cat(found, dim=1).mean(dim=1).tolist(), strict=True))
