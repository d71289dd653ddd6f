"""Samples to tensors: the global batch of a step dealt to ranks and micro-batches.

Promises:

- All ranks have equally many micro-batches, so that their collectives match; where the items of a global batch or of
  an evaluation do not suffice, a rank gets a batch without targets. No sample is repeated to fill up.
- Similar lengths meet: padded rows in one micro-batch, packs of similar cost on all ranks at a time.
- Samples in one row are told apart by positions that begin again, and by their bounds.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from kit.data.feed.packing import balance
from kit.data.samples.samples import Samples

# One micro-batch of B rows, S of whose tokens are supervised, padded on the right to T tokens:
#   input_ids [B, T] int64,
#   target_positions [S] int64: b * T + t of the hidden states that predict a supervised token,
#   targets [S] int64: those tokens; weights [S] float32 in the loss; sources [S] int64, see Samples.sources;
# where each row is one sample:
#   attention_mask [B, T] int64;
# where it is a pack, n segments in all, the padding of a row one of them:
#   position_ids [B, T] int64, cu_seq_lens_q = cu_seq_lens_k [n + 1] int32 over the B * T tokens,
#   max_length_q = max_length_k int, the longest segment.
Batch = dict[str, Any]
Item = np.ndarray  # int64, the samples of one row


class Rows(Protocol):
    """What tensors are made from: ``Samples``, or those of one step of a stream."""

    sources: np.ndarray

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]: ...


def micro_batches(
    samples: Samples,
    items: Sequence[Item],
    process_index: int,
    num_processes: int,
    micro_batch_size: int,
    pad_token_id: int,
    packing: bool,
) -> list[Batch]:
    """This rank's share of a global batch: ceil(len(items) / (ranks * size)) batches, as on every rank."""
    shares = deal(samples.lengths, items, num_processes, micro_batch_size, packing)
    return [collate(samples, share[process_index], pad_token_id, packing) for share in shares]


def evaluation_batches(
    samples: Samples, process_index: int, num_processes: int, micro_batch_size: int, pad_token_id: int
) -> Iterator[Batch]:
    """This rank's share of all samples, each of them on exactly one rank; equally many batches on every rank."""
    items = list(np.arange(len(samples))[:, None])
    for share in deal(samples.lengths, items, num_processes, micro_batch_size, packing=False):
        yield collate(samples, share[process_index], pad_token_id, packing=False)


def deal(
    lengths: np.ndarray, items: Sequence[Item], num_processes: int, micro_batch_size: int, packing: bool
) -> list[list[list[Item]]]:
    """The items of each rank in each micro-step, heaviest first: memory peaks at once or never."""
    if packing:
        # Attention costs the square of each sample's length; no rank should wait for another.
        costs = np.array([np.square(lengths[item], dtype=np.int64).sum() for item in items])
        dealt = balance(costs, num_processes, micro_batch_size)  # [micro-steps, ranks, size], -1 for none
        return [[[items[i] for i in share if i >= 0] for share in micro_step] for micro_step in dealt]
    order = np.argsort([-lengths[item[0]] for item in items], kind="stable")
    micro_steps = [
        order[i : i + num_processes * micro_batch_size] for i in range(0, len(order), num_processes * micro_batch_size)
    ]
    return [[[items[i] for i in share] for share in np.array_split(step, num_processes)] for step in micro_steps]


def padding_share(lengths: np.ndarray, dealt: Sequence[Sequence[Sequence[Item]]]) -> float:
    """Of the tokens that are computed, those that only fill up rows."""
    used = computed = 0
    for micro_step in dealt:
        for share in micro_step:
            rows = [int(lengths[item].sum()) for item in share]
            used += sum(rows)
            computed += max(rows, default=0) * len(rows)
    return 1 - used / computed


def collate(samples: Rows, items: Sequence[Item], pad_token_id: int, packing: bool) -> Batch:
    """Rows as tensors, see ``Batch``. Without ``items``: one token that nothing attends to and no target."""
    rows = [[samples[i] for i in item] for item in items] or [[(np.array([pad_token_id]), np.zeros(1))]]
    num_tokens = [sum(len(ids) for ids, _ in row) for row in rows]
    length = max(num_tokens)
    input_ids = np.full((len(rows), length), pad_token_id, np.int64)
    attention_mask = np.zeros((len(rows), length), np.int64)
    position_ids = np.zeros((len(rows), length), np.int64)
    weights = np.zeros((len(rows), length), np.float32)
    sources = np.zeros((len(rows), length), np.int64)
    bounds = [0]  # of the segments, over the flattened tokens
    for b, row in enumerate(rows):
        start = 0
        for j, (ids, sample_weights) in enumerate(row):
            end = start + len(ids)
            input_ids[b, start:end] = ids
            position_ids[b, start:end] = np.arange(len(ids))
            weights[b, start + 1 : end] = sample_weights[1:]  # nothing predicts a first token
            sources[b, start:end] = samples.sources[items[b][j]] if len(items) else 0
            bounds.append(b * length + end)
            start = end
        attention_mask[b, :start] = 1
        if start < length:
            position_ids[b, start:] = np.arange(length - start)
            bounds.append((b + 1) * length)
    at, t = np.nonzero(weights[:, 1:])
    batch: Batch = {
        "input_ids": torch.from_numpy(input_ids),
        "target_positions": torch.from_numpy(at * length + t),
        "targets": torch.from_numpy(input_ids[at, t + 1]),
        "weights": torch.from_numpy(weights[at, t + 1]),
        "sources": torch.from_numpy(sources[at, t + 1]),
    }
    if not packing:
        return batch | {"attention_mask": torch.from_numpy(attention_mask)}
    cu_seq_lens, longest = torch.tensor(bounds, dtype=torch.int32), int(np.diff(bounds).max())
    batch |= {"cu_seq_lens_q": cu_seq_lens, "cu_seq_lens_k": cu_seq_lens}
    return batch | {"position_ids": torch.from_numpy(position_ids), "max_length_q": longest, "max_length_k": longest}
