"""Runs the kit's own step on fake GPUs, and reports what it asked of them. It needs no GPU, and uses none.

    python tests/fake_gpu.py --shape llama-8b --method lora qlora --topology single fsdp2 --world 1 8 --length 4096

The process simulates rank 0 of ``world``. Tensors are fake (torch's ``FakeTensorMode``), the process group is torch's
fake one, and ``fake_cuda.cpp`` makes torch take "cuda" for a device. The rest is real: the command line, the topology,
Accelerate, adapters, loss head, optimiser, sharding, feed, ``train_step``, ``evaluate`` and the copies of a save.

These are replaced: reading weights (they are made by shape), the rendezvous, threads (their work is done at once, since
a mode is of its thread), what a save does after its copies, and bitsandbytes' parameter class (its quantisation and
products run, by shape). DDP never sorts its buckets anew.

It sees: an operation across devices; tensors on a wrong device or of a wrong dtype; host synchronisations, pageable
copies, casts and wide matrix products, with the line that asks for them; the bytes held at the peak, by component;
collectives and their bytes; which attention kernel is chosen.

It cannot see:

- NCCL and the other ranks: a hang, a mismatch, the buffers of a communicator;
- numbers: a scalar read from a device is 1, a flag is false. So no loss, and nothing that depends on data;
- kernels' own workspaces, results and speed, and whether a kernel exists for a shape, the 4-bit ones among them;
- time, and what overlaps: all streams are one;
- the allocator: rounding, fragmentation, and what the CUDA runtime itself takes of a GPU.

What passes here is not verified on a GPU.
"""

import argparse
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import fake_cuda  # noqa: E402
from filelock import FileLock  # noqa: E402

from benchmarks.simulation.simulate import set_rank_0_variables  # noqa: E402
from kit.config.settings.objective import DECLARED  # noqa: E402

CONFIGS = {"single": "single", "ddp": "ddp", "fsdp2": "fsdp", "hybrid": "fsdp_hybrid", "offload": "fsdp_offload"}
SHAPES = {"tiny": ROOT / "recipes/tiny/model"} | {p.name: p for p in sorted((ROOT / "recipes/shapes").iterdir())}
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """What is simulated."""

    shape: str = "tiny"
    method: str = "lora"
    topology: str = "single"
    world: int = 1
    length: int = 64  # of a row, in tokens; of several samples every other row is a quarter shorter
    rows: int = 1  # samples of a micro-batch; a pair takes two rows
    micro_batches: int = 3  # of the longer of the two measured steps; the other one has 1
    packing: bool = False
    checkpointing: bool = True
    fp8: bool = False
    bf16: bool = True  # else float32
    activation_offload: bool = False
    objective: str = "sft"
    precompute_reference: bool = False
    fault: str = ""  # a name of ``fake_faults.FAULTS``

    @property
    def folder(self) -> Path:
        """The folder with the model's config."""
        return SHAPES[self.shape]

    @property
    def config(self) -> str:
        """The Accelerate config, as a run names it."""
        name = CONFIGS[self.topology]
        if self.bf16:
            return name
        text = (ROOT / f"accelerate_configs/{name}.yaml").read_text()
        path = Path(tempfile.mkdtemp()) / f"{name}.yaml"
        path.write_text(text.replace("mixed_precision: bf16", 'mixed_precision: "no"'))
        return str(path)


def prepare_process(library: Path) -> None:
    """Load the library, and import what a simulation imports."""
    fake_cuda.load(library)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    import bitsandbytes  # noqa: F401  before CUDA seems to be there: it would look for its kernels
    import fake_gpu_run  # noqa: F401


def simulate(case: Case, deadline_seconds: int = 590) -> dict[str, Any]:
    """Run ``case`` in a child of this process, since it changes its process for good, and return the report."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        child = os.fork()
        if not child:
            signal.alarm(deadline_seconds)
            set_rank_0_variables(case.world, fake_cuda.NUM_DEVICES)
            import fake_gpu_run

            began = time.perf_counter()
            report = fake_gpu_run.run(case)
            path.write_text(json.dumps(report | {"seconds": time.perf_counter() - began}))
            os._exit(0)  # the interpreter's own end would free fake storages in an order that crashes
        _, status = os.waitpid(child, 0)
        if path.exists():
            return json.loads(path.read_text())
        return {"case": asdict(case), "error": {"type": "crash", "message": f"status {status}", "lines": []}}


def serve() -> None:
    """Read cases from standard input, a JSON object a line, and write a line with the report of each."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    for line in sys.stdin:
        output.write(json.dumps(simulate(Case(**json.loads(line)))) + "\n")
        output.flush()


class Server:
    """A process that simulates cases. It imports once what they need, when the first one is asked for."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: for the library and the reports. Servers of several processes may share it.
        """
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, **values: Any) -> dict[str, Any]:
        """Simulate ``Case(**values)``, unless that was done already. A child that hangs is ended by its own alarm."""
        asked = json.dumps(asdict(Case(**values)))
        report = self._folder / f"{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"
        with FileLock(report.with_suffix(".lock")):
            if not report.exists():
                process = self._process = self._process or self._start()
                assert process.stdin and process.stdout
                print(asked, file=process.stdin, flush=True)
                report.write_text(process.stdout.readline())
            return json.loads(report.read_text())

    def _start(self) -> "subprocess.Popen[str]":
        with FileLock(self._folder / "library.lock"):
            fake_cuda.build(self._folder)
        command = [sys.executable, __file__, "--serve", "--library", str(self._folder)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end(self) -> None:
        """End the process."""
        if self._process:
            self._process.kill()
            self._process.wait()


# --- the table


def many(report: dict[str, Any]) -> dict[str, Any]:
    """What was counted in the step of several micro-batches."""
    return report[f"step of {report['case']['micro_batches']} micro-batches"]


def num_per_micro_batch(report: dict[str, Any], what: str) -> float:
    """How much of ``what`` each further micro-batch of a step adds."""
    return sum(report["per micro-batch"][what].values())


def num_per_step(report: dict[str, Any], what: str) -> float:
    """How much of ``what`` a step has beside what its micro-batches have."""
    return sum(report["step of 1 micro-batch"].get(what, {}).values()) - num_per_micro_batch(report, what)


def growth(report: dict[str, Any]) -> int:
    """Bytes that the GPU's peak grows by from 1 micro-batch to several, beyond this rank's part of the gradients."""
    peak = many(report)["peaks"]["cuda"] - report["step of 1 micro-batch"]["peaks"]["cuda"]
    return peak - report["gradient bytes"]


def row(report: dict[str, Any]) -> str:
    """A row of the table."""
    case = Case(**report["case"])
    cells = [case.method, case.topology, str(case.world)]
    if "error" in report:
        error = report["error"]
        where = error["lines"][-1].split(" ")[0] if error["lines"] else ""
        return _line([*cells, f"{error['type']} in {where}: {error['message'].splitlines()[0][:120]}"])
    step = many(report)
    parts = step["components"]["cuda"].items()
    collectives = step.get("collective_bytes", {})
    cells += [
        "0" if not report["misplaced"] else f"{len(report['misplaced'])} misplaced",
        f"{num_per_micro_batch(report, 'syncs'):g}",
        f"{num_per_step(report, 'syncs'):g}",
        f"{num_per_micro_batch(report, 'pageable'):g}",
        f"{step['peaks']['cuda'] / GIB:.2f}",
        ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts if size > step["peaks"]["cuda"] / 200),
        f"{max(0, growth(report)) / GIB:.2f}",
        ", ".join(f"{step['collectives'][name]} {name} {size / 1e9:.2f}" for name, size in collectives.items()) or "-",
        f"{report['second save']['peaks'].get('cpu', 0) / GIB:.2f}",
        f"{report['seconds']:.0f}",
    ]
    return _line(cells)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


COLUMNS = [
    *("method", "topology", "GPUs", "device errors", "syncs / micro-batch", "syncs / step", "pageable / micro-batch"),
    *("peak GiB", "of it", "growth GiB", "collectives, GB a step", "host GiB in a save", "s"),
]


def _cases(values: dict[str, Any]) -> Iterator[Case]:
    methods, topologies, worlds = (values.pop(name) for name in ("method", "topology", "world"))
    for method, topology, world in itertools.product(methods, topologies, worlds):
        if (topology == "single") == (world == 1):
            yield Case(method=method, topology=topology, world=world, **values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--method", nargs="+", default=["lora"], choices=("full", "lora", "qlora"))
    parser.add_argument("--topology", nargs="+", default=["single"], choices=CONFIGS)
    parser.add_argument("--world", nargs="+", type=int, default=[1], help="GPUs; 1 is for single")
    for name in ("length", "rows", "micro_batches"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Case, name))
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    parser.add_argument("--activation_offload", action="store_true")
    parser.add_argument("--objective", default="sft", choices=DECLARED)
    parser.add_argument("--precompute_reference", action="store_true")
    parser.add_argument("--fault", default="", help="inject a fault of fake_faults.py")
    parser.add_argument("--library", type=Path, default=Path(tempfile.gettempdir()), help="folder of the built library")
    parser.add_argument("--json", action="store_true", help="print whole reports")
    parser.add_argument("--serve", action="store_true", help="read cases from standard input")
    values = vars(parser.parse_args())
    folder, as_json, serves = (values.pop(name) for name in ("library", "json", "serve"))
    prepare_process(fake_cuda.build(folder))
    if serves:
        return serve()
    if not as_json:
        print(_line(COLUMNS), _line(["---"] * len(COLUMNS)), sep="\n", flush=True)
    for case in _cases(values):
        report = simulate(case)
        print(json.dumps(report, indent=1) if as_json else row(report), flush=True)


if __name__ == "__main__":
    main()
