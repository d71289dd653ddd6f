"""The embeddings gathered from all ranks, and retrieval metrics: nDCG, MRR, recall."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from xxhash import xxh3_64_intdigest

from kit.data.feed.batches import MicroBatch
from kit.strategy.accelerator import Prepared
from kit.strategy.float64 import in_float64

RETRIEVED = 10  # documents that nDCG and recall look at
RETRIEVAL = (f"ndcg_at_{RETRIEVED}", "mrr", "recall_at_1", f"recall_at_{RETRIEVED}")
_AT_ONCE = 1024  # anchors whose similarities are computed together


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


def gather(prepared: Prepared, micro_batches: Sequence[MicroBatch], own: Sequence[torch.Tensor]) -> Texts:
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
