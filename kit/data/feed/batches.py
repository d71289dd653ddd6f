"""From samples to tensors: deal the items of a global batch to ranks and micro-batches, and collate them.

An item is what fills one row: a sample, or the samples of a pack.

Promises:

- All ranks have the same number of micro-batches, so that their collectives match. If there are not enough items, a
  rank gets a micro-batch without targets. No sample is repeated to fill a batch.
- Items of similar length are dealt together: padded rows to the same micro-batch, packs of similar cost to all ranks
  at the same time.
- In a packed row, ``position_ids`` begin at 0 with each sample, and ``cu_seq_lens`` holds the bounds of the samples.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from kit.data.feed.packing import balance
from kit.data.feed.ranks import Ranks
from kit.data.samples.samples import Samples

Item = np.ndarray  # int64, indices of the samples of one row


class Rows(Protocol):
    """The samples that ``Collator`` reads: ``Samples``, or the samples of one step of a stream."""

    dataset_ids: np.ndarray  # [N], the index of the data set of each sample

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and weights of sample ``i``."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """B rows, padded on the right to T tokens each. S of their tokens are supervised (targets)."""

    input_ids: torch.Tensor  # int64 [B, T]
    target_positions: torch.Tensor  # int64 [S]: b * T + t, the positions whose hidden state predicts a target
    targets: torch.Tensor  # int64 [S]: ids of the supervised tokens
    weights: torch.Tensor  # float32 [S]: of each target in the loss
    dataset_ids: torch.Tensor  # int64 [S]: the data set of each target, see ``Samples.dataset_ids``
    # Set if each row is one sample.
    attention_mask: torch.Tensor | None = None  # int64 [B, T]
    # Set if each row is a pack. There are n segments in all; the padding of a row is a segment too.
    position_ids: torch.Tensor | None = None  # int64 [B, T]: from 0 in each segment
    cu_seq_lens: torch.Tensor | None = None  # int32 [n + 1]: bounds of the segments over the B * T tokens
    max_seq_len: int | None = None  # tokens of the longest segment
    token_mask: torch.Tensor | None = None  # int64 [B, T]: 0 for padding, which routers' statistics leave out
    num_tokens: int = 0  # without padding

    def to(self, device: torch.device) -> "MicroBatch":
        """Return a copy with all tensors on ``device``; from pinned memory the host does not wait for it."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> "MicroBatch":
        """Return a copy with all tensors in pinned host memory, from which a GPU copies without the host."""
        return self._with(torch.Tensor.pin_memory)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changed)

    def model_inputs(self) -> dict[str, Any]:
        """Return the keyword arguments for a model with a loss head (``kit.model.loss_head``).

        The model then returns the loss of each target in nats, float32 [S].
        """
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids,
            "target_positions": self.target_positions,
            "targets": self.targets,
        }
        if self.cu_seq_lens is None:
            return inputs | {"attention_mask": self.attention_mask}
        return inputs | {
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.cu_seq_lens,
            "cu_seq_lens_k": self.cu_seq_lens,
            "max_length_q": self.max_seq_len,
            "max_length_k": self.max_seq_len,
            "token_mask": self.token_mask,
        }


@dataclass(frozen=True)
class Collator:
    """Deals items to ranks and micro-batches, and builds the tensors."""

    micro_batch_size: int  # rows
    pad_token_id: int
    packing: bool

    def micro_batches(self, samples: Samples, items: Sequence[Item], ranks: Ranks) -> list[MicroBatch]:
        """Return this rank's share of a global batch.

        Every rank gets ceil(len(items) / (number of ranks * micro-batch size)) micro-batches.
        """
        micro_steps = self.deal(samples.lengths, items, ranks.count)
        return [self.collate(samples, shares[ranks.index]) for shares in micro_steps]

    def deal(self, lengths: np.ndarray, items: Sequence[Item], num_ranks: int) -> list[list[list[Item]]]:
        """Deal the items of a global batch.

        The longest come first, so that a lack of memory shows in the first micro-batch.

        Args:
            lengths: [N], tokens of each sample.

        Returns:
            For each micro-step, the items of each rank.
        """
        size = self.micro_batch_size
        if self.packing:
            # Equal costs save ranks from waiting for each other.
            dealt = balance(
                _attention_costs(lengths, items), num_ranks, size
            )  # [micro-steps, ranks, size], -1 for none
            return [[[items[i] for i in share if i >= 0] for share in micro_step] for micro_step in dealt]
        order = np.argsort(-lengths[[item[0] for item in items]], kind="stable")
        micro_steps = []
        for start in range(0, len(order), num_ranks * size):
            indices = order[start : start + num_ranks * size]
            shares = [_share(indices, rank, num_ranks).tolist() for rank in range(num_ranks)]
            micro_steps.append([[items[i] for i in share] for share in shares])
        return micro_steps

    def collate(self, samples: Rows, items: Sequence[Item]) -> MicroBatch:
        """Build the tensors of a micro-batch. Without ``items``: one padding token and no target."""
        rows = [[samples[i] for i in item] for item in items]
        num_tokens = [sum(len(ids) for ids, _ in row) for row in rows]
        if not rows:
            rows = [[(np.array([self.pad_token_id]), np.zeros(1))]]
        length = max(num_tokens, default=1)
        input_ids = np.full((len(rows), length), self.pad_token_id, np.int64)
        attention_mask = np.zeros((len(rows), length), np.int64)
        position_ids = np.zeros((len(rows), length), np.int64)
        weights = np.zeros((len(rows), length), np.float32)
        dataset_ids = np.zeros((len(rows), length), np.int64)
        bounds = [0]  # of the segments in the flattened [B * T] tokens
        for b, row in enumerate(rows):
            start = 0
            for j, (ids, sample_weights) in enumerate(row):
                end = start + len(ids)
                input_ids[b, start:end] = ids
                position_ids[b, start:end] = np.arange(len(ids))
                # The first token has no token before it that predicts it.
                weights[b, start + 1 : end] = sample_weights[1:]
                if len(items):
                    dataset_ids[b, start:end] = samples.dataset_ids[items[b][j]]
                bounds.append(b * length + end)
                start = end
            attention_mask[b, :start] = 1
            if start < length:
                position_ids[b, start:] = np.arange(length - start)
                bounds.append((b + 1) * length)
        target_rows, t = np.nonzero(weights[:, 1:])
        micro_batch = MicroBatch(
            input_ids=torch.from_numpy(input_ids),
            target_positions=torch.from_numpy(target_rows * length + t),
            targets=torch.from_numpy(input_ids[target_rows, t + 1]),
            weights=torch.from_numpy(weights[target_rows, t + 1]),
            dataset_ids=torch.from_numpy(dataset_ids[target_rows, t + 1]),
            num_tokens=sum(num_tokens),
        )
        if not self.packing:
            return replace(micro_batch, attention_mask=torch.from_numpy(attention_mask))
        return replace(
            micro_batch,
            position_ids=torch.from_numpy(position_ids),
            cu_seq_lens=torch.tensor(bounds, dtype=torch.int32),
            max_seq_len=int(np.diff(bounds).max()),
            token_mask=torch.from_numpy(attention_mask),
        )


def _attention_costs(lengths: np.ndarray, items: Sequence[Item]) -> np.ndarray:
    """The cost of attention of each item, int64 [number of items]: it grows with the square of a sample's length."""
    squares = np.square(lengths[np.concatenate(items)], dtype=np.int64)
    sums = np.append(0, np.cumsum(squares))  # of the samples before each sample
    bounds = np.cumsum([0, *map(len, items)])  # of the items
    return np.diff(sums[bounds])


def evaluation_batches(samples: Samples, ranks: Ranks, size: int, pad_token_id: int) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches of an evaluation.

    Each sample is on exactly one rank, and every rank gets the same number of micro-batches.

    Args:
        size: rows of a micro-batch.
    """
    collator = Collator(size, pad_token_id, packing=False)
    order = np.argsort(-samples.lengths, kind="stable")  # the longest first, as in ``Collator.deal``
    for start in range(0, len(order), ranks.count * size):
        share = _share(order[start : start + ranks.count * size], ranks.index, ranks.count)
        yield collator.collate(samples, list(share[:, None]))


def _share(indices: np.ndarray, rank: int, num_ranks: int) -> np.ndarray:
    """The part of ``indices`` [N] for one rank. The parts follow one another; the first ones may be longer by one."""
    size, num_longer = divmod(len(indices), num_ranks)
    start = rank * size + min(rank, num_longer)
    end = start + size + (1 if rank < num_longer else 0)
    return indices[start:end]


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all steps: CUDA's allocator keeps memory apart for each stream that it has seen."""
    return torch.cuda.Stream(device)


def on_device(micro_batches: Iterable[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """Yield the micro-batches on ``device``. A GPU copies one while it computes the one before."""
    if device.type != "cuda":
        yield from (micro_batch.to(device) for micro_batch in micro_batches)
        return
    stream = _copy_stream(device)
    waiting = iter(micro_batches)

    def copy_next() -> MicroBatch | None:
        following = next(waiting, None)
        if following is None:
            return None
        with torch.cuda.stream(stream):
            return following.pin().to(device)

    ahead = copy_next()
    while ahead is not None:
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(stream)
        for tensor in ahead.tensors().values():
            tensor.record_stream(computing)  # its memory was allocated on the other stream
        current, ahead = ahead, copy_next()
        yield current


def padding_share(lengths: np.ndarray, dealt: Sequence[Sequence[Sequence[Item]]]) -> float:
    """Return the share of padding among the tokens that the model computes.

    Args:
        lengths: [N], tokens of each sample.
        dealt: as ``Collator.deal`` returns it.
    """
    used = computed = 0
    for micro_step in dealt:
        for share in micro_step:
            rows = [int(lengths[item].sum()) for item in share]
            used += sum(rows)
            computed += max(rows, default=0) * len(rows)
    return 1 - used / computed
