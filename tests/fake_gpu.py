"""Runs the kit's own step on fake GPUs, and reports what it asked of them. It needs no GPU, and uses none.

    echo '{"shape": "llama-8b", "topology": "fsdp2", "world": 8, "length": 4096}' | python tests/fake_gpu.py FOLDER

It reads cases, the fields of ``Case``, as a JSON object a line, and writes the report of each; FOLDER gets the library.
The process simulates rank 0 of ``world``. Tensors are fake (torch's ``FakeTensorMode``), the process group is torch's
fake one, and ``fake_cuda.cpp`` makes torch take "cuda" for a device. The rest is real: the command line, the topology,
Accelerate, adapters, loss head, optimiser, sharding, feed, ``train_step`` and ``evaluate``.

These are replaced: reading weights (they are made by shape), the rendezvous, threads (their work is done at once, since
a mode is of its thread), and bitsandbytes' parameter class (its quantisation and products run, by shape). DDP never
sorts its buckets anew.

It sees: an operation across devices; tensors on a wrong device or of a wrong dtype; host synchronisations, pageable
copies and wide matrix products, with the line that asks for them; the bytes held at the peak, by component;
collectives and their bytes; which attention kernel is chosen.

It cannot see:

- NCCL and the other ranks: a hang, a mismatch, the buffers of a communicator;
- numbers: a scalar read from a device is 1, a flag is false. So no loss, and nothing that depends on data;
- kernels' own workspaces, results and speed, and whether a kernel exists for a shape, the 4-bit ones among them;
- time, and what overlaps: all streams are one;
- the allocator: rounding, fragmentation, and what the CUDA runtime itself takes of a GPU.

What passes here is not verified on a GPU.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import fake_cuda  # noqa: E402
from filelock import FileLock  # noqa: E402

from benchmarks.simulation.simulate import set_rank_0_variables  # noqa: E402

CONFIGS = {"single": "single", "ddp": "ddp", "fsdp2": "fsdp", "hybrid": "fsdp_hybrid", "offload": "fsdp_offload"}
SHAPES = {"tiny": ROOT / "recipes/tiny/model"} | {p.name: p for p in sorted((ROOT / "recipes/shapes").iterdir())}


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
    activation_offload: bool = False
    objective: str = "sft"
    precompute_reference: bool = False

    @property
    def folder(self) -> Path:
        """The folder with the model's config."""
        return SHAPES[self.shape]


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

            path.write_text(json.dumps(fake_gpu_run.run(case)))
            os._exit(0)  # the interpreter's own end would free fake storages in an order that crashes
        _, status = os.waitpid(child, 0)
        if path.exists():
            return json.loads(path.read_text())
        return {"case": asdict(case), "error": f"the process ended with status {status}"}


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
        command = [sys.executable, __file__, str(self._folder)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end(self) -> None:
        """End the process."""
        if self._process:
            self._process.kill()
            self._process.wait()


# --- what a report says


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


def main() -> None:
    prepare_process(fake_cuda.build(Path(sys.argv[1])))
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    for line in sys.stdin:
        output.write(json.dumps(simulate(Case(**json.loads(line)))) + "\n")
        output.flush()


if __name__ == "__main__":
    main()
