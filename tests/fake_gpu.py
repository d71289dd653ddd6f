"""Runs the kit's own step on fake GPUs, and reports what it asked of them. It needs no GPU, and uses none.

    python tests/fake_gpu.py --shape llama-8b --method lora --topology fsdp2 --world 8 --length 4096

The process simulates rank 0 of ``world``. Tensors are fake (torch's ``FakeTensorMode``), the process group is torch's
fake one, and ``fake_cuda.cpp`` makes torch take "cuda" for a device. The rest is real: the command line, the topology,
Accelerate, adapters, loss head, optimiser, sharding, feed, ``train_step``, ``evaluate`` and the copies of a save.

These are replaced: reading weights (they are made by shape), the rendezvous, threads (their work is done at once, since
a mode is of its thread), torch's stager (it copies storages, which fake tensors lack), and bitsandbytes' parameter
class (its quantisation and products run, by shape). DDP never sorts its buckets anew.

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
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import fake_cuda  # noqa: E402

CONFIGS = {"single": "single", "ddp": "ddp", "fsdp2": "fsdp", "offload": "fsdp_offload"}
SHAPES = {"tiny": ROOT / "recipes/tiny/model"} | {p.name: p for p in sorted((ROOT / "recipes/shapes").iterdir())}


@dataclass(frozen=True)
class Case:
    """What is simulated."""

    shape: str = "tiny"
    method: str = "lora"
    topology: str = "single"
    world: int = 1
    length: int = 64
    rows: int = 1  # of a micro-batch
    micro_batches: int = 3  # of the longer of the two measured steps; the other has one
    packing: bool = False
    checkpointing: bool = True
    fault: str = ""  # one of FAULTS

    @property
    def folder(self) -> Path:
        """The folder with the model's config."""
        return SHAPES[self.shape]

    @property
    def config(self) -> str:
        """The name of the Accelerate config."""
        return CONFIGS[self.topology]


def simulate(case: Case, library: Path) -> dict[str, Any]:
    """Run ``case`` in this process, which must not have imported torch, and return the report."""
    fake_cuda.load(library)
    rank = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": case.world, "LOCAL_WORLD_SIZE": min(8, case.world)}
    os.environ |= {name: str(value) for name, value in rank.items()} | {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
    }
    import bitsandbytes  # noqa: F401  before CUDA seems to be there: it would look for its kernels
    import fake_gpu_run

    return fake_gpu_run.run(case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--method", default="lora", choices=("full", "lora", "qlora"))
    parser.add_argument("--topology", default="single", choices=CONFIGS)
    parser.add_argument("--library", type=Path, help="folder for the compiled library")
    for name in ("world", "length", "rows", "micro_batches"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Case, name))
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    parser.add_argument("--fault", default="")
    values = vars(parser.parse_args())
    folder = values.pop("library") or Path(tempfile.gettempdir())
    report = simulate(Case(**values), fake_cuda.build(folder))
    print(json.dumps(report, indent=1), flush=True)
    os._exit(0)  # the interpreter's own end would free fake storages in an order that crashes


if __name__ == "__main__":
    main()
