"""How the work of each step that all ranks do together grows with the number of ranks, samples or items.

    python benchmarks/scale.py [--only survey save] [--save now.json] [--before earlier.json] [--picture growth.png]

Prints a Markdown table with the exponent of each growth: the slope of a straight line through the logarithms. Work that
doubles with the ranks has 1, work that does not grow has 0. Nothing here needs a GPU:

- ranks of the key-value store are threads, each with its own connection to one real TCPStore;
- collectives are replaced by a meter that notes the bytes of what each rank is sent;
- files, samples and items are real.

``--save`` keeps the figures, ``--before`` draws those of an earlier commit beside.
"""

import argparse
import json
import os
import pickle
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: E402

from kit.checkpoint import manifest, save, tensor_files  # noqa: E402
from kit.config.settings.output import OutputSettings  # noqa: E402
from kit.data.feed.batches import Collator, evaluation_batches  # noqa: E402
from kit.data.feed.order import Order  # noqa: E402
from kit.data.feed.ranks import Ranks  # noqa: E402
from kit.failures import survey as surveys  # noqa: E402
from kit.failures.survey import RankStatus, take_survey  # noqa: E402
from kit.strategy import rendezvous  # noqa: E402
from kit.strategy import store as stores  # noqa: E402
from kit.strategy.agreement import Fact, exchange  # noqa: E402
from kit.strategy.store import BoundedStore  # noqa: E402
from kit.train import replicas  # noqa: E402

NUM_TENSORS = 723  # of Llama 70B
CHECKPOINT_BYTES = 1 << 22
Figures = dict[str, float]  # by name and unit


class Counted:
    """A store that counts the calls of its methods and the bytes that they carry."""

    def __init__(self, store: Any, totals: dict[str, int]) -> None:
        self._store, self._totals = store, totals

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = getattr(self._store, name)(*args)
            with LOCK:
                self._totals["calls"] += 1
                self._totals["bytes"] += len(pickle.dumps((args, result)))
            return result

        return call


LOCK = threading.Lock()


def on_threads(
    world: int, rank: Callable[[int, Any], None], before: Callable[[int, Any], None] | None = None
) -> Figures:
    """Run ``rank`` as all ranks at once, each with its own connection; ``before`` is not counted."""
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    totals = {"calls": 0, "bytes": 0}
    stores = [torch.distributed.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(world)]
    if before:
        for number, store in enumerate(stores):
            before(number, store)
    threads = [
        threading.Thread(target=rank, args=(number, Counted(store, totals))) for number, store in enumerate(stores)
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "store calls, all ranks": totals["calls"], "bytes, all ranks": totals["bytes"]}


def survey(world: int) -> Figures:
    """After a failure, all ranks ask at once who is gone. Seconds beside those of the silence itself."""

    def write(number: int, store: Any) -> None:
        status = RankStatus(number, 1, 7, "training", host="machine-17", pid=4711)
        store.set(str(number), json.dumps(asdict(status)))

    def ask(number: int, store: Any) -> None:
        take_survey(BoundedStore(store, ""), world, 60.0)

    patched = mock.patch.object
    silent_seconds = 1.0  # all ask within it, as in the 4 s of a run
    with patched(surveys, "SILENT_SECONDS", silent_seconds), patched(stores, "STORE_SECONDS", 600.0):
        figures = on_threads(world, ask, write)
    return figures | {"seconds": figures["seconds"] - silent_seconds}


def meeting(world: int) -> Figures:
    """All ranks meet, and compare 50 facts."""
    facts = [Fact(f"fact {i}", "a value", "fix it") for i in range(50)]
    ours = threading.local()

    def rank(number: int, store: Any) -> None:
        ours.store = store
        exchange(rendezvous._meet(number, world, 600.0), number, world, facts, [])

    with (
        mock.patch.object(rendezvous, "_connect", lambda *_: ours.store),
        mock.patch.object(torch.distributed, "PrefixStore", Prefixed),
    ):
        return on_threads(world, rank)


class Prefixed:
    """As torch's, which takes no store of ours."""

    def __init__(self, name: str, store: Any) -> None:
        self.set = lambda key, value: store.set(f"{name}/{key}", value)
        self.get = lambda key: store.get(f"{name}/{key}")


def resume(world: int) -> Figures:
    """All ranks check one checkpoint of a constant size, a file of each rank in it."""
    hashed = [0]
    describe_file = manifest.describe_file

    def counting(path: Path) -> dict[str, Any]:
        entry = describe_file(path)
        hashed[0] += entry["bytes"]
        return entry

    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint_of(Path(folder), world)
        with mock.patch.object(manifest, "describe_file", counting):
            for rank in range(world):
                manifest.verify(path, slice(rank, None, world))
    return {"bytes hashed, all ranks": hashed[0], "bytes hashed, a rank": hashed[0] / world}


def headers(world: int) -> Figures:
    """All ranks learn what a checkpoint of FSDP2 holds: a file of each rank, with a shard of each tensor."""
    opened = [0]
    header = tensor_files._header

    def counting(path: Path) -> dict[str, Any]:
        opened[0] += 1
        return header(path)

    names = [f"{kind}.layers.{i}.weight" for kind in ("model", "exp_avg", "exp_avg_sq") for i in range(NUM_TENSORS)]
    with tempfile.TemporaryDirectory() as name, mock.patch.object(tensor_files, "_header", counting):
        folder = Path(name)
        for number in range(world):
            offsets = {name: {"saved_offsets": [number, 0]} for name in names}
            tensor_files.write_tensors(
                folder / f"shard-{number:05d}.safetensors",
                {name: torch.ones(1, 2) for name in names},
                {"DCP_SHARDING_INFO": json.dumps(offsets)},
            )
        start = time.process_time()
        stored = tensor_files.stored_tensors(folder)
        sent = pickle.dumps(stored)
        seconds = {"seconds, rank 0": time.process_time() - start}
        shards = {}
        for name in names:
            shards[name] = torch.ones(1, 2)
            chunk = ChunkStorageMetadata(torch.Size([1, 0]), torch.Size([1, 2]))
            shards[name].__create_chunk_list__ = lambda chunk=chunk: [chunk]  # type: ignore[attr-defined]
        start = time.process_time()
        received = pickle.loads(sent)
        data: Any = tensor_files.TensorReader(folder, received, shards).read_metadata().storage_data
        seconds["seconds, another rank"] = time.process_time() - start
    files = len({place.relative_path for place in data.values()})
    counts = {"files opened for their headers, all ranks": opened[0], "files that a rank reads": files}
    return counts | {"bytes received, a rank": len(sent)} | seconds


def checkpoint_of(folder: Path, world: int) -> Path:
    (folder / manifest.STATE).write_text("{}")
    for number in range(world):
        (folder / f"shard-{number:05d}.safetensors").write_bytes(bytes(CHECKPOINT_BYTES // world))
    files = {path.name: manifest.describe_file(path) for path in folder.iterdir()}
    record: dict[str, Any] = {"format": manifest.FORMAT, "step": 1, "identity": {}, "strategy": {}, "versions": {}}
    record["files"] = files
    record["xxh3_128"] = manifest.digest_of(record)
    (folder / manifest.MANIFEST).write_text(json.dumps(record))
    return folder


@contextmanager
def metered(world: int) -> Iterator[dict[str, int]]:
    """Replace collectives: each notes the bytes that all ranks receive, and that rank 0 receives."""
    received = {"all": 0, "rank 0": 0}

    def note(everyone: int, rank_0: int) -> None:
        received["all"] += everyone
        received["rank 0"] += rank_0

    def all_gather(outputs: list[Any], value: Any, group: Any = None) -> None:
        size = len(pickle.dumps(value)) + 8  # all ranks learn all sizes, as int64
        note(world * world * size, world * size)
        outputs[:] = [value] * world

    def gather(value: Any, outputs: list[Any] | None = None, dst: int = 0, group: Any = None, **_: Any) -> None:
        size = len(pickle.dumps(value))
        note(world * size + 8 * world * world, world * size + 8 * world)  # all ranks learn all sizes, as int64
        if outputs is not None:
            outputs[:] = [value] * world

    def broadcast(values: list[Any], src: int = 0, group: Any = None, **_: Any) -> None:
        size = len(pickle.dumps(values))
        note(world * size, 0)

    def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None) -> None:
        note(2 * world * tensor.nbytes, 2 * tensor.nbytes)  # a ring sends each value twice

    def gather_for_all(values: list[Any]) -> list[Any]:
        outputs: list[Any] = [None] * world
        all_gather(outputs, values)
        return [each for part in outputs for each in part]

    with (
        mock.patch.multiple(
            torch.distributed,
            all_gather_object=all_gather,
            gather_object=gather,
            broadcast_object_list=broadcast,
            all_reduce=all_reduce,
            is_initialized=lambda: True,
        ),
        mock.patch.object(replicas, "gather_object", gather_for_all),
    ):
        yield received


def names_at_save(world: int) -> Figures:
    """What ranks exchange after they have written a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        staging, target = Path(folder) / "checkpoints" / ".staging", Path(folder) / "checkpoints" / "step-00000001"
        staging.mkdir(parents=True)
        for number in range(world):
            (staging / f"shard-{number:05d}.safetensors").write_bytes(b"1")
        alone: Any = SimpleNamespace(process_index=0, num_processes=1)
        saver = save.Saver(alone, OutputSettings(), target.parent, {}, timeout_seconds=1800)
        saver._world, saver._group = world, object()
        arguments: Any = ({}, None, None, staging, target, {"step": 1}, {}, None)
        with metered(world) as received, mock.patch.object(save.dcp, "save"):
            saver._complete(*arguments)
    return {"bytes received, all ranks": received["all"], "bytes received, rank 0": received["rank 0"]}


def replica_sums(world: int) -> Figures:
    """One comparison of the replicas of ``NUM_TENSORS`` tensors and their gradients."""
    parameters = {f"model.layers.{i}.mlp.weight": torch.nn.Parameter(torch.ones(2)) for i in range(NUM_TENSORS)}
    for parameter in parameters.values():
        parameter.grad = torch.ones(2)
    prepared: Any = SimpleNamespace(accelerator=SimpleNamespace(device=torch.device("cpu")), model=None)
    with metered(world) as received, mock.patch.object(replicas, "replicated", lambda *_: parameters):
        replicas.compare_replicas(prepared, 1)
    return {"bytes received, all ranks": received["all"], "bytes received, rank 0": received["rank 0"]}


def order(num_samples: int) -> Figures:
    """The order of an epoch, as each rank makes it."""
    lengths, dataset_ids = np.ones(num_samples, np.int32), np.zeros(num_samples, np.int16)
    made: list[Order] = []

    def make() -> None:
        made[:] = [Order(lengths, dataset_ids, seed=0, batch_size=64)]
        made[0].epoch(0)

    seconds, peak = timed(make)
    tracemalloc.start()
    make()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"seconds": seconds, "peak bytes": peak, "bytes kept": kept}


def dealing(packing: bool) -> Callable[[int], Figures]:
    """One step's items: choose them and deal them to 64 ranks."""

    def measure(num_items: int) -> Figures:
        rng = np.random.default_rng(0)
        lengths = rng.integers(20, 500, 4 * num_items, dtype=np.int32)
        capacity = 1024 if packing else None
        made = Order(lengths, np.zeros(len(lengths), np.int16), 0, num_items, capacity=capacity)
        made.epoch(0)
        collator = Collator(4, 0, packing, 512)
        ranks = Ranks(0, 64)

        def deal() -> None:
            items = made.batch(0)
            collator.deal(lengths, items, ranks.count)

        seconds, _ = timed(deal)
        return {"seconds": seconds}

    return measure


def evaluation(num_samples: int) -> Figures:
    """Until an evaluation over 64 ranks has its first two micro-batches."""
    lengths = np.random.default_rng(0).integers(20, 500, num_samples, dtype=np.int32)

    class Rows:
        dataset_ids = np.zeros(num_samples, np.int16)

        def __init__(self) -> None:
            self.lengths = lengths

        def __len__(self) -> int:
            return num_samples

        def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
            return np.zeros(lengths[i], np.int32), np.ones(lengths[i], np.float32)

    rows: Any = Rows()
    seconds, peak = timed(lambda: list(islice(evaluation_batches(rows, Ranks(0, 64), 4, 0), 2)))
    return {"seconds": seconds, "peak bytes": peak}


def timed(call: Callable[[], Any]) -> tuple[float, int]:
    """The least processor seconds of three calls, and the most bytes that one more has allocated."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return min(seconds), peak


ROWS: dict[str, tuple[str, Callable[[int], Figures], tuple[int, ...]]] = {
    "survey": ("ranks", survey, (16, 32, 64, 128, 256)),
    "meeting": ("ranks", meeting, (8, 16, 32, 64, 128, 256)),
    "resume": ("ranks", resume, (8, 32, 128, 512)),
    "headers": ("ranks", headers, (8, 32, 128, 512)),
    "save": ("ranks", names_at_save, (8, 32, 128, 512, 2048, 4096)),
    "replicas": ("ranks", replica_sums, (8, 32, 128, 512, 2048, 4096)),
    "order": ("samples", order, (100_000, 1_000_000, 10_000_000)),
    "dealing": ("items", dealing(packing=False), (256, 1024, 4096, 16384)),
    "dealing packs": ("items", dealing(packing=True), (256, 1024, 4096, 16384)),
    "evaluation": ("samples", evaluation, (10_000, 100_000, 1_000_000)),
}


def slope(sizes: list[int], values: list[float]) -> float:
    """The exponent of the growth."""
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(values, 1e-9)), 1)[0])


def curves(measured: dict[str, Any]) -> Iterator[tuple[str, str, str, list[int], list[float]]]:
    for name, points in measured.items():
        for unit in points[0][1]:
            yield name, ROWS[name][0], unit, [size for size, _ in points], [figures[unit] for _, figures in points]


def table(measured: dict[str, Any]) -> list[str]:
    lines = ["| what | figure | at the smallest | at the largest | exponent |", "|---|---|---|---|---|"]
    for name, of, unit, sizes, values in curves(measured):
        ends = (f"{value:.4g} at {size:,} {of}" for size, value in ((sizes[0], values[0]), (sizes[-1], values[-1])))
        lines.append(f"| {name} | {unit} | {' | '.join(ends)} | {slope(sizes, values):.2f} |")
    return lines


def draw(measured: dict[str, Any], before: dict[str, Any], path: Path) -> None:
    """One small plot for each figure, both axes logarithmic, those of ``before`` dashed."""
    from matplotlib.figure import Figure

    shown = list(curves(measured))
    columns = 4
    figure = Figure(figsize=(16, 3.2 * -(-len(shown) // columns)), layout="constrained")
    figure.suptitle("Growth of the work: before dashed, now solid; the number is the exponent")
    earlier = {(name, unit): (sizes, values) for name, _, unit, sizes, values in curves(before)}
    for axes, (name, of, unit, sizes, values) in zip(
        figure.subplots(-(-len(shown) // columns), columns).flat, shown, strict=False
    ):
        if old := earlier.get((name, unit)):
            axes.loglog(*old, "o--", color="#c44", label=f"before, {slope(*old):.2f}")
        axes.loglog(sizes, values, "o-", color="#247", label=f"now, {slope(sizes, values):.2f}")
        axes.set_title(f"{name}: {unit}", fontsize=10)
        axes.set_xlabel(of)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    for axes in figure.axes[len(shown) :]:
        axes.set_visible(False)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--save", type=Path, help="write the figures as JSON")
    parser.add_argument("--before", type=Path, help="figures that --save wrote on an earlier commit")
    parser.add_argument("--picture", type=Path, help="draw the curves")
    options = parser.parse_args()
    measured: dict[str, Any] = {}
    for name in options.only:
        of, measure, sizes = ROWS[name]
        measured[name] = []
        for size in sizes:
            measured[name].append([size, measure(size)])
            print(f"{name}, {size:,} {of}: {measured[name][-1][1]}", file=sys.stderr, flush=True)
        if options.save:
            options.save.write_text(json.dumps(measured, indent=1))
    print("\n".join(table(measured)))
    if options.picture:
        draw(measured, json.loads(options.before.read_text()) if options.before else {}, options.picture)


if __name__ == "__main__":
    main()
