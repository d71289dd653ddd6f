"""How full packs are, and what packing takes, for a million drawn lengths and for lengths of your own.

    python benchmarks/packing.py [--lengths FILE.npy ...] [--capacity 2048]

A file holds one integer array [N], tokens of each sample. Prints a Markdown table. Seconds are the best of three on one
core; memory is the peak that tracemalloc sees while packing, over the number of samples, lengths and result included.
"""

import argparse
import time
import tracemalloc
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kit.data.feed.packing import fill_share, pack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=Path, default=[], help=".npy files of lengths")
    parser.add_argument("--capacity", type=int, default=2048, help="tokens per pack")
    args = parser.parse_args()
    drawn = np.random.default_rng(0).lognormal(np.log(180), 0.8, 1_000_000)
    sets = {"log-normal, median 180, sigma 0.8": np.clip(drawn, 1, args.capacity).astype(np.int64)}
    sets |= {path.stem: np.load(path) for path in args.lengths}
    print(
        f"| lengths | N | packs of {args.capacity:,} | full | seconds | bytes per sample |\n|---|---|---|---|---|---|"
    )
    for name, lengths in sets.items():
        print(f"| {name} | {len(lengths):,} | {' | '.join(table_cells(lengths, args.capacity))} |")


def table_cells(lengths: NDArray[np.int64], capacity: int) -> list[str]:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        packs = pack(lengths, capacity)
        seconds.append(time.perf_counter() - start)
    tracemalloc.start()  # in a separate pass, because it slows packing down
    pack(lengths.copy(), capacity)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    share = fill_share(packs, lengths, capacity)
    return [f"{len(packs):,}", f"{share:.3%}", f"{min(seconds):.3f}", f"{peak_bytes / len(lengths):.0f}"]


if __name__ == "__main__":
    main()
