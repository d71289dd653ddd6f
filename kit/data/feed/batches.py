"""From samples to tensors: deal the items of a global batch to ranks and micro-batches, and collate them.

An item is what fills one row: a sample, or the samples of a pack.

Promises:

- All ranks have the same number of micro-batches, so that their collectives match. If there are not enough items, a
  rank gets a micro-batch without targets. No sample is repeated to fill a batch.
- Items of similar length are dealt together: padded rows to the same micro-batch, packs of similar cost to all ranks
  at the same time.
- Padded rows have few different lengths: see ``padded_length``.
- In a packed row, ``position_ids`` begin at 0 with each sample, and ``cu_seq_lens`` holds the bounds of the samples.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch

from kit.data.feed.data_ranks import Ranks
from kit.data.feed.packing import balance
from kit.data.samples.records import Table

Item = np.ndarray  # int64, indices of the samples of one row


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """B rows, padded on the right to T tokens each. S of their tokens are supervised (targets)."""

    input_ids: torch.Tensor  # int64 [B, T]
    target_positions: torch.Tensor  # int64 [S]: b * T + t, the positions whose hidden state predicts a target
    targets: torch.Tensor  # int64 [S]: ids of the supervised tokens
    weights: torch.Tensor  # float32 [S]: of each target in the loss
    dataset_ids: torch.Tensor  # int64 [S]: the dataset of each target, see ``Samples.dataset_ids``
    # Set if each row is one sample.
    attention_mask: torch.Tensor | None = None  # int64 [B, T]
    # Set if each row is a pack. There are n segments in all; the padding of a row is a segment too.
    position_ids: torch.Tensor | None = None  # int64 [B, T]: from 0 in each segment
    cu_seq_lens: torch.Tensor | None = None  # int32 [n + 1]: bounds of the segments over the B * T tokens
    segment_lengths: tuple[int, ...] | None = None  # [n], tokens of each, for the host
    token_mask: torch.Tensor | None = None  # int64 [B, T]: 0 for padding, which routers' statistics leave out
    num_tokens: int = 0  # without padding
    squared_lengths: int = 0  # the sum over the sequences: what attention's cost grows with
    # Of each sequence: its first position b * T + t, its tokens, and the number of its sample, equal on every topology.
    segments: tuple[tuple[int, int, int], ...] = ()
    # Further inputs of an objective, by name. There are n sequences; of pair k, sequence 2 k is the chosen one and
    # 2 k + 1 the rejected one. ``RowKind.per_sequence`` says what each kind of rows has; what is attached to samples is
    # there too, such as ``references``, float64 [n], the reference's log-probability; and of kto ``kl``, float64 [n],
    # an estimate over the global batch.
    per_sequence: dict[str, torch.Tensor] = field(default_factory=dict)
    per_target: dict[str, torch.Tensor] = field(default_factory=dict)  # [S, ...] each
    sequence_ids: torch.Tensor | None = None  # int64 [S]: the sequence of each target
    # If the data have images or audio: the inputs of the encoders, by the names of their arguments, and what the
    # decoder needs per token. An encoder for which the rows have nothing gets a dummy, so that every rank runs it.
    encoder_inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    dummy_inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    token_inputs: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def max_seq_len(self) -> int | None:
        """Tokens of the longest segment."""
        return None if self.segment_lengths is None else max(self.segment_lengths)

    def to(self, device: torch.device) -> "MicroBatch":
        """Return a copy with all tensors on ``device``; from pinned memory the host does not wait for it."""
        # Apple's GPUs (MPS) have no float64.
        return self._with(
            lambda tensor: (
                tensor
                if device.type == "mps" and tensor.dtype == torch.float64
                else tensor.to(device, non_blocking=True)
            )
        )

    def pin(self) -> "MicroBatch":
        """Return a copy with all tensors of the host in pinned memory, from which a GPU copies without the host."""
        return self._with(lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor)

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors."""
        own = [value for value in vars(self).values() if isinstance(value, torch.Tensor)]
        named = (self.per_sequence, self.per_target, self.encoder_inputs, self.dummy_inputs, self.token_inputs)
        return [*own, *chain.from_iterable(each.values() for each in named)]

    def with_per_sequence(self, **values: torch.Tensor) -> "MicroBatch":
        """Return a copy with more ``per_sequence``."""
        return replace(self, per_sequence={**self.per_sequence, **values})

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                changed[name] = change(value)
            elif isinstance(value, dict):
                changed[name] = {key: change(tensor) for key, tensor in value.items()}
        return replace(self, **changed)

    def model_inputs(self) -> dict[str, Any]:
        """Return the keyword arguments for a model with a loss head (``kit.model.layers.loss_head``).

        The model then returns the loss of each target in nats, float32 [S].
        """
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids,
            "target_positions": self.target_positions,
            "targets": self.targets,
        }
        of_media: dict[str, Any] = self.token_inputs | self.encoder_inputs
        if self.dummy_inputs:
            of_media["dummy_media"] = self.dummy_inputs
        if self.cu_seq_lens is None:
            return inputs | {"attention_mask": self.attention_mask} | of_media
        inputs |= {
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.cu_seq_lens,
            "cu_seq_lens_k": self.cu_seq_lens,
            "max_length_q": self.max_seq_len,
            "max_length_k": self.max_seq_len,
            "segment_lengths": self.segment_lengths,
            "token_mask": self.token_mask,
        }
        return inputs | of_media


def padded_length(longest: int, max_length: int) -> int:
    """Return the tokens to which the rows of a micro-batch are padded: there are 16 lengths per octave.

    A GPU pays for each new shape: for a plan of cuDNN, for memory of another size, for a graph if it compiles. From 128
    on, rounding adds less than a sixteenth, or that and 8 tokens; below, lengths are multiples of 8.

    Args:
        longest: tokens of the longest row.
        max_length: tokens that a row may have. It is not padded beyond them: a model may have no more positions.
    """
    step = max(8, 1 << max(0, (longest - 1).bit_length() - 5))  # a sixteenth of the power of two below
    length = -(-longest // step) * step
    if length % 128 == 64:  # with a mask, the gradients of cuDNN's attention are then NaN (pytorch issue 196678)
        length += 8
    return max(longest, min(length, max_length))


@dataclass(frozen=True)
class Collator:
    """Deals items to ranks and micro-batches, and builds the tensors."""

    micro_batch_size: int  # items; a pair takes two rows, unless it is in a pack
    pad_token_id: int
    packing: bool
    max_length: int  # tokens of the longest row that there may be; padding does not go beyond it

    def micro_batches(self, samples: Table, items: Sequence[Item], ranks: Ranks) -> list[MicroBatch]:
        """Return this rank's share of a global batch.

        Every rank gets ceil(len(items) / (number of ranks * micro-batch size)) micro-batches.
        """
        lengths = samples.lengths if self.packing else samples.row_lengths
        micro_steps = self.deal(lengths, items, ranks.count)
        return [self.collate(samples, shares[ranks.index]) for shares in micro_steps]

    def deal(self, lengths: np.ndarray, items: Sequence[Item], num_ranks: int) -> list[list[list[Item]]]:
        """Deal the items of a global batch.

        The longest come first, so that a lack of memory shows in the first micro-batch.

        Args:
            lengths: [N], tokens of each sample; without packing, of its longest row.

        Returns:
            For each micro-step, the items of each rank.
        """
        size = self.micro_batch_size
        if self.packing:
            # The cost of attention grows with the square of a sample's length. Equal ones save ranks from waiting.
            squares = np.square(lengths[np.concatenate(items)], dtype=np.int64)
            costs = np.add.reduceat(squares, np.cumsum([0, *map(len, items[:-1])]))  # [number of items]
            dealt = balance(costs, num_ranks, size)  # [micro-steps, ranks, size], -1 for none
            return [[[items[i] for i in share if i >= 0] for share in micro_step] for micro_step in dealt]
        order = np.argsort(-lengths[[item[0] for item in items]], kind="stable")
        micro_steps = []
        for start in range(0, len(order), num_ranks * size):
            indices = order[start : start + num_ranks * size]
            shares = [_share(indices, rank, num_ranks).tolist() for rank in range(num_ranks)]
            micro_steps.append([[items[i] for i in share] for share in shares])
        return micro_steps

    def width(self, num_tokens: Sequence[int]) -> int:
        """Return the tokens of each row of a micro-batch, padding included, from those that its rows hold."""
        longest = max(num_tokens, default=1)
        return longest if self.packing else padded_length(longest, self.max_length)

    def collate(self, samples: Table, items: Sequence[Item]) -> MicroBatch:
        """Build the tensors of a micro-batch. Without ``items``: one row of padding and no target."""
        # Each sequence with its sample's index, and its own number in that sample.
        rows = [[(int(i), k, *each) for i in item for k, each in enumerate(samples.sequences(i))] for item in items]
        if not self.packing:  # each has a row of its own
            rows = [[each] for row in rows for each in row]
        num_tokens = [sum(len(ids) for _, _, ids, _ in row) for row in rows]
        length = self.width(num_tokens)
        shape = max(len(rows), 1), length
        # Of each of the B * T tokens:
        input_ids = np.full(shape[0] * length, self.pad_token_id, np.int64)
        weights = np.zeros(len(input_ids), np.float32)
        sequence_ids = np.zeros(len(input_ids), np.int64)
        segments: list[tuple[int, int, int]] = []
        numbers: list[int] = []
        bounds = [0]  # padding included
        for b in range(shape[0]):
            start = b * length
            for i, k, ids, its_weights in rows[b] if rows else []:
                end = start + len(ids)
                input_ids[start:end] = ids
                first = 0 if samples.kind.pools else 1  # no token before the first one predicts it
                weights[start + first : end] = its_weights[first:]
                sequence_ids[start:end] = len(segments)
                segments.append((start, len(ids), i))
                numbers.append(k)
                bounds.append(end)
                start = end
            if start < (b + 1) * length:
                bounds.append((b + 1) * length)
        sizes = np.diff(bounds)
        mask = torch.from_numpy((np.arange(length) < np.array(num_tokens or [1])[:, None]).astype(np.int64))
        members = np.array([i for _, _, i in segments], np.int64)
        at = np.flatnonzero(weights)
        own: dict[str, Any] = {"attention_mask": mask}
        if self.packing:
            position_ids = np.arange(len(input_ids)) - np.repeat(bounds[:-1], sizes)
            own = {
                "position_ids": torch.from_numpy(position_ids.reshape(shape)),
                "cu_seq_lens": torch.tensor(bounds, dtype=torch.int32),
                "segment_lengths": tuple(sizes.tolist()),
                "token_mask": mask,
            }
        of_sequences = samples.per_sequence(members, np.array(numbers, np.int64))
        own |= samples.media_inputs(input_ids.reshape(shape), segments)
        return MicroBatch(
            input_ids=torch.from_numpy(input_ids.reshape(shape)),
            target_positions=torch.from_numpy(at if samples.kind.pools else at - 1),
            targets=torch.from_numpy(input_ids[at]),
            weights=torch.from_numpy(weights[at]),
            dataset_ids=torch.from_numpy(samples.dataset_ids[members][sequence_ids[at]].astype(np.int64)),
            num_tokens=sum(num_tokens),
            squared_lengths=sum(size**2 for _, size, _ in segments),
            segments=tuple(segments),
            sequence_ids=torch.from_numpy(sequence_ids[at]),
            per_sequence={name: torch.from_numpy(values) for name, values in of_sequences.items()},
            per_target={name: torch.from_numpy(values) for name, values in samples.per_target(members).items()},
            **own,
        )


def evaluation_batches(samples: Table, ranks: Ranks, size: int, pad_token_id: int) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches of an evaluation.

    Each sample is on exactly one rank, and every rank gets the same number of micro-batches.

    Args:
        size: samples of a micro-batch.
    """
    collator = Collator(size, pad_token_id, packing=False, max_length=int(samples.row_lengths.max()))
    for share in shares(samples.row_lengths, np.arange(len(samples.row_lengths)), ranks, size):
        yield collator.collate(samples, list(share[:, None]))


def shares(row_lengths: np.ndarray, chosen: np.ndarray, ranks: Ranks, size: int) -> Iterator[np.ndarray]:
    """Yield the samples of each of this rank's micro-batches, int64: each of ``chosen`` is on exactly one rank.

    Every rank gets the same number of micro-batches, some of which may be empty.

    Args:
        row_lengths: [N], tokens of each sample's longest row.
        chosen: indices of samples.
        size: samples of a micro-batch.
    """
    # The longest first, as in ``Collator.deal``.
    order = chosen[np.argsort(-row_lengths[chosen], kind="stable")]
    for start in range(0, len(order), ranks.count * size):
        yield _share(order[start : start + ranks.count * size], ranks.index, ranks.count)


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
        for tensor in ahead.tensors():
            tensor.record_stream(computing)  # its memory was allocated on the other stream
        current, ahead = ahead, copy_next()
        yield current
