"""What each lever of speed and memory changes in one step of Llama 8B on one row of 4,096 tokens, without a GPU.

    python benchmarks/ladder.py [--method lora qlora full] [--length 4096]

For `lora` and `qlora` on one GPU, and `full` with FSDP2 on eight: a step without levers, with each lever alone, and
with several. TFLOP, bytes, launches and memory are counted while the kit's own step runs on tensors without values
(benchmarks/simulation). Graphs of compiled layers are those that inductor makes of one layer for a CPU, where a
few hundred tokens run; their bytes are continued to the whole row, and their memory is the plan's. Milliseconds are
a roofline's: the counts over an H100's datasheet, in the shares that ``kit plan`` takes as the best case. They are
not measured.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.simulation.simulate import Simulated, simulate  # noqa: E402
from kit.memory.formulas import predict  # noqa: E402
from kit.memory.workload import Workload  # noqa: E402
from kit.strategy.strategies import FSDP2, SINGLE  # noqa: E402
from kit.tools.plan import speed  # noqa: E402
from kit.tools.plan.hardware import GPUS  # noqa: E402
from kit.tools.plan.models import read_shape  # noqa: E402

H100 = GPUS["h100"]
GIB = 2**30
# What is in a layer when it is compiled: few enough for a CPU, and enough that bytes grow in proportion.
COMPILED_LENGTHS = (128, 256)
PEFT_FORWARD = "import kit.model.lora_linear as one; one.install_lora_linear = lambda model: None"
LAYERS = 32


@dataclass(frozen=True)
class Rung:
    """Levers of one row of the table."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)  # of the workload
    in_place: bool = True  # adapters by the kit's own function
    compiled: bool = False


@dataclass(frozen=True)
class Counts:
    """Of one step, or of one layer in both passes."""

    flops: float
    gigabytes: float  # read and written by all but products and attention
    launches: float

    def milliseconds(self) -> float:
        """By an H100's datasheet, at the shares of the plan's best case."""
        assert H100.tflops and H100.bandwidth
        products = self.flops / (H100.tflops * 1e12 * speed.PRODUCTS[1])
        return 1e3 * (products + self.gigabytes * 1e9 / (H100.bandwidth * speed.MEMORY_SHARE))


def rungs(method: str) -> list[Rung]:
    """The rows of a method's table: the first has no lever."""
    chunks = {"device_memory": 79 * GIB}
    plain = method == "full"  # which has no adapters
    single = [] if plain else [Rung("adapters in place")]
    others = [
        Rung("compiled layers", in_place=plain, compiled=True),
        Rung("loss head in chunks for this GPU", chunks, in_place=plain),
        Rung("selective checkpointing", {"gradient_checkpointing": "selective"}, in_place=plain),
        Rung("checkpointing", {"gradient_checkpointing": True}, in_place=plain),
    ]
    together = [
        Rung(
            "for speed: compiled, chunks" if plain else "for speed: in place, compiled, chunks", chunks, compiled=True
        ),
        Rung(
            "for memory: the same with selective checkpointing, not compiled",
            chunks | {"gradient_checkpointing": "selective"},
        ),
    ]
    return [Rung("none", in_place=plain), *single, *others, *together]


def workload_of(method: Any, length: int, num_layers: int, folder: Path) -> Workload:
    """One row of ``length`` tokens with Llama 8B, cut to ``num_layers``."""
    config = json.loads((ROOT / "recipes/shapes/llama-8b/config.json").read_text())
    path = folder / f"layers-{num_layers}" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    topology = {"strategy": FSDP2, "num_gpus": 8} if method == "full" else {"strategy": SINGLE}
    return Workload(shape=read_shape(path, "llama-8b"), method=method, length=length, **topology)


def simulated(workload: Workload, in_place: bool) -> Simulated:
    """``simulate``, with peft's own forward for adapters unless ``in_place``."""
    run = subprocess.run

    def patched(command: list[str], **values: Any) -> Any:
        code = f"{PEFT_FORWARD}; from benchmarks.simulation import fake_run; fake_run.main()"
        return run([sys.executable, "-c", code] if not in_place else command, **values)

    with patch("benchmarks.simulation.simulate.subprocess.run", patched):
        return simulate(workload)


def compiled_layer(method: str, in_place: bool, length: int) -> Counts:
    """A compiled layer in both passes on ``length`` tokens; products are not counted."""
    ask = [sys.executable, __file__, "--layer", method, "--in_place", str(int(in_place))]
    counts = []
    for tokens in COMPILED_LENGTHS:
        done = subprocess.run([*ask, "--length", str(tokens)], stdout=subprocess.PIPE, text=True, check=True)
        counts.append(json.loads(done.stdout.splitlines()[-1]))
    short, long = COMPILED_LENGTHS
    slope = (counts[1]["bytes"] - counts[0]["bytes"]) / (long - short)
    size = counts[1]["bytes"] + slope * (length - long)
    return Counts(0.0, size / 1e9, counts[1]["launches"])


def table(method: str, length: int, folder: Path) -> None:
    """Print the rows of one method."""
    print(f"\n| {method} | TFLOP | GB | launches | simulated GiB | plan | plan's launches | ms by the roofline |")
    print("|---|---|---|---|---|---|---|---|")
    whole = workload_of(method, length, LAYERS, folder)
    for rung in rungs(method):
        workload = replace(whole, **rung.changes)
        seen = simulated(workload, rung.in_place)
        # Of 4-bit products torch counts nothing: they are those of lora.
        flops = (simulated(replace(workload, method="lora"), rung.in_place) if method == "qlora" else seen).flops
        counts = Counts(flops, seen.elementwise_bytes / 1e9, seen.launches)
        planned = replace(workload, fuses=rung.compiled)
        real = "not simulated" if rung.compiled else f"{seen.tensors / GIB:.2f}"
        if rung.compiled:  # the layers' own counts are replaced by those of their graphs
            few, more = (
                simulated(replace(workload_of(method, length, layers, folder), **rung.changes), rung.in_place)
                for layers in (2, 4)
            )
            layer = compiled_layer(method, rung.in_place, length)
            counts = Counts(
                counts.flops,
                counts.gigabytes - LAYERS * ((more.elementwise_bytes - few.elementwise_bytes) / 2e9 - layer.gigabytes),
                counts.launches - LAYERS * ((more.launches - few.launches) / 2 - layer.launches),
            )
        step = speed.step(planned, H100)
        assert step
        cells = [rung.name, f"{counts.flops / 1e12:.1f}", f"{counts.gigabytes:.1f}", f"{counts.launches:,.0f}", real]
        cells += [f"{predict(planned).tensors / GIB:.2f}", f"{step.launches:,.0f}", f"{counts.milliseconds():.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def count_layer(method: str, in_place: bool, length: int) -> None:
    """Compile one layer of the 8B shape and run both passes; print the kernels of its graphs and their bytes."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch._inductor.graph import GraphLowering
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    from kit.model.compile import CompiledLayers
    from kit.model.lora_linear import install_lora_linear

    torch._inductor.config.force_disable_caches = True
    values = json.loads((ROOT / "recipes/shapes/llama-8b/config.json").read_text())
    config = LlamaConfig(**(values | {"num_hidden_layers": 1, "vocab_size": 256, "dtype": "bfloat16"}))
    torch.set_default_dtype(torch.bfloat16)
    model: Any = LlamaForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    if method == "qlora":
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            quantised = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16"
            )
            model = LlamaForCausalLM.from_pretrained(folder, quantization_config=quantised, dtype="bfloat16").train()
    if method != "full":
        model.requires_grad_(False)
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        if in_place:
            install_lora_linear(model)
    layers = CompiledLayers(model, ["LlamaDecoderLayer"])
    layers.is_on = True
    counted = {"launches": 0, "bytes": 0}
    make = GraphLowering.codegen

    def counting(graph: Any) -> Any:
        result = make(graph)
        for node in graph.scheduler.nodes:
            kind = type(getattr(node, "node", None)).__name__
            if kind != "MultiOutput" and "Nop" not in type(node).__name__:
                counted["launches"] += 1
                # An extern kernel is a product, attention, or the conversion of 4-bit weights.
                counted["bytes"] += 0 if node.is_extern() else node.get_read_write_buffers_sizes()
        return result

    x = torch.randn(1, length, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    found = {type(module).__name__: module for module in model.modules()}
    angles = found["LlamaRotaryEmbedding"](x, torch.arange(length)[None])
    with patch.object(GraphLowering, "codegen", counting):
        with torch.autocast("cpu", torch.bfloat16, enabled=method != "full"):  # FSDP2 casts by itself
            y = found["LlamaDecoderLayer"](x, attention_mask=None, position_embeddings=angles)
        y.sum().backward()
    print(json.dumps(counted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", nargs="+", default=["lora", "qlora", "full"], choices=("lora", "qlora", "full"))
    parser.add_argument("--length", type=int, default=4096, help="tokens of the row")
    parser.add_argument("--layer", default="", help=argparse.SUPPRESS)
    parser.add_argument("--in_place", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.layer:
        count_layer(options.layer, bool(options.in_place), options.length)
        return
    with tempfile.TemporaryDirectory() as folder:
        for method in options.method:
            table(method, options.length, Path(folder))


if __name__ == "__main__":
    main()
