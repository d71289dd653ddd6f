"""Throughput of a run since the last line of its log, and the time lost to data and padding.

Promises: no step is synchronised for it. Hosts exchange a few numbers once per line, without their devices. An unknown
value is absent, not zero.
"""

import time
from typing import TYPE_CHECKING, Any

import torch

from kit.memory.operations import operations_per_token, without_recomputation
from kit.memory.out_of_memory import peak_bytes

if TYPE_CHECKING:
    from kit.data.feed.data_ranks import Ranks
    from kit.data.feed.feed import GlobalBatch
    from kit.memory.workload import Workload

MUCH = 0.05  # fraction of the time from which a loss of time is printed


class Throughput:
    """Counts steps, and sums them up for a line of the log. Every rank makes the same calls."""

    def __init__(self, ranks: "Ranks", device: torch.device, workload: "Workload | None" = None) -> None:
        """
        Args:
            workload: of a step; None: not known.
        """
        self._ranks, self._device = ranks, device
        self._workload = workload and without_recomputation(workload)
        self.num_ranks = ranks.count
        self.training_seconds = 0.0  # of all steps so far, without evaluations
        self.num_steps = 0  # so far
        self._warm = (0, 0.0)  # steps and seconds of the first line: a first step takes longer than others
        self._clear()

    def _clear(self) -> None:
        self._since = self._stepped = time.perf_counter()
        self._tokens = 0  # of all ranks, without padding
        # Of this rank: seconds; tokens computed, those that are no padding, and the supervised ones.
        self._waited_seconds = 0.0
        self._computed_tokens = self._used_tokens = self._targets = self._squared_lengths = 0

    def add(self, batch: "GlobalBatch") -> None:
        """Count a step."""
        self._stepped = time.perf_counter()
        self.num_steps += 1
        self._tokens += int(batch.num_tokens.sum())
        self._waited_seconds += batch.waited_seconds
        self._computed_tokens += sum(micro_batch.input_ids.numel() for micro_batch in batch.micro_batches)
        self._used_tokens += sum(micro_batch.num_tokens for micro_batch in batch.micro_batches)
        self._targets += sum(len(micro_batch.targets) for micro_batch in batch.micro_batches)
        self._squared_lengths += sum(micro_batch.squared_lengths for micro_batch in batch.micro_batches)

    def skip_time(self) -> None:
        """Leave out the time since the last step, which an evaluation took."""
        now = time.perf_counter()
        self._since += now - self._stepped
        self._stepped = now

    def take(self) -> dict[str, Any]:
        """Return the entries of a line about the steps since the last one. Called by all ranks.

        Returns:
            Of all ranks: ``tokens_per_second``; ``data_wait_share``, of the rank that waited longest; with several the
            highest memory. Of rank 0: ``peak_memory_bytes``, ``padding_share``; ``tflops_per_second``, 10^12 operations
            of its samples, padding and recomputation left out (``without_recomputation``).
        """
        passed = max(time.perf_counter() - self._since, 1e-9)
        self.training_seconds += passed
        self._warm = self._warm if self._warm[0] else (self.num_steps, self.training_seconds)
        rate, memory = self._tokens / passed, peak_bytes(self._device.type == "cpu")
        waits, memories = self._of_all_ranks([self._waited_seconds, float(memory)])
        row: dict[str, Any] = {"tokens_per_second": rate, "peak_memory_bytes": memory}
        row["data_wait_share"] = max(waits) / passed
        if self._computed_tokens:
            row["padding_share"] = 1 - self._used_tokens / self._computed_tokens
        if self._workload and (used := self._used_tokens):
            supervised, seen = self._targets / used, self._squared_lengths / used
            operations = used * operations_per_token(self._workload, supervised, seen)
            row["tflops_per_second"] = operations / self._workload.sequence_parallel_size / passed / 1e12
        if self.num_ranks > 1:
            row["highest_peak_memory_bytes"] = int(max(memories))
        self._clear()
        return row

    def seconds_of(self, num_steps: int) -> float:
        """Return how long more steps will take; 0 if it is not known yet."""
        steps, seconds = self._warm
        return (self.training_seconds - seconds) / max(1, self.num_steps - steps) * num_steps

    def _of_all_ranks(self, own: list[float]) -> list[list[float]]:
        """For each of ``own``, the numbers of all ranks."""
        if self.num_ranks == 1:
            return [[number] for number in own]
        table = torch.zeros(self.num_ranks, len(own), dtype=torch.float64)  # [ranks, numbers]
        table[self._ranks.index] = torch.tensor(own, dtype=torch.float64)
        numbers: list[list[float]] = self._ranks.sum(table).T.tolist()
        return numbers


def speed_text(row: dict[str, Any]) -> str:
    """Return throughput and memory for a line on the terminal. Time lost to data is shown from ``MUCH`` on."""
    text = f"{row['tokens_per_second']:,.0f} tok/s  "
    if "tflops_per_second" in row:
        text += f"{row['tflops_per_second']:.3g} TFLOP/s{' a rank' if 'highest_peak_memory_bytes' in row else ''}  "
    text += f"{row.get('highest_peak_memory_bytes', row['peak_memory_bytes']) / 2**30:.1f} GiB"
    if row["data_wait_share"] >= MUCH:
        text += f"  {row['data_wait_share']:.0%} waiting for data"
    return text
