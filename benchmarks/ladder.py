"""What each lever of speed and memory changes in one step of Llama 8B on one row of 4,096 tokens, without a GPU.

    python benchmarks/ladder.py [--method lora qlora full] [--length 4096]

For `lora` and `qlora` on one GPU, and `full` with FSDP2 on eight: a step without levers, with each lever alone, and
with several. TFLOP, bytes, launches and memory are counted while the kit's own step runs on tensors without values
(benchmarks/simulation). Graphs of compiled layers, and of the loss of a chunk, are those that inductor makes for a CPU,
where a few hundred tokens run; their bytes are continued to the whole row, and their memory is the plan's.
Milliseconds are a roofline's: the counts over an H100's datasheet, in the shares that ``kit plan`` takes as the best
case. They are not measured. The first ones take products by their operations alone; the second ones take each product
by its operations or its bytes, whichever is longer, and count the copy of the sum that cuBLAS makes where ``addmm`` is
not in place.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.simulation.simulate import Simulated, simulate  # noqa: E402
from kit.memory.formulas import chunk_tokens, predict  # noqa: E402
from kit.memory.workload import Workload  # noqa: E402
from kit.strategy.strategies import FSDP2, SINGLE  # noqa: E402
from kit.tools.plan import speed  # noqa: E402
from kit.tools.plan.hardware import GPUS  # noqa: E402
from kit.tools.plan.models import read_shape  # noqa: E402

H100 = GPUS["h100"]
GIB = 2**30
# What is in a layer when it is compiled: few enough for a CPU, and enough that bytes grow in proportion.
# Odd, since an even one that some width has too would be a constant of the graph.
COMPILED_LENGTHS = (129, 257)
PEFT_FORWARD = "import kit.model.layers.lora_linear as one; one.install_lora_linear = lambda model: None"
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
    products: float  # seconds of products and attention, each by its operations or its bytes
    copied: float = 0.0  # gigabytes of the sums that products copy

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(mine + own for mine, own in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: float) -> "Counts":
        return Counts(*(times * each for each in astuple(self)))

    def milliseconds(self) -> tuple[float, float]:
        """By an H100's datasheet, at the shares of the plan's best case: products by operations alone, and by both."""
        alone = seconds_of(self.flops, 0) + seconds_of(0, self.gigabytes * 1e9)
        return 1e3 * alone, 1e3 * (self.products + seconds_of(0, (self.gigabytes + self.copied) * 1e9))


def seconds_of(flops: float, size: float) -> float:
    """The longer of the times that operations and bytes take."""
    assert H100.tflops and H100.bandwidth
    return max(flops / (H100.tflops * 1e12 * speed.PRODUCTS[1]), size / (H100.bandwidth * speed.MEMORY_SHARE))


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


def counts_of(seen: Simulated) -> Counts:
    products = sum(seconds_of(*each) for each in seen.product_sizes)
    return Counts(seen.flops, seen.elementwise_bytes / 1e9, seen.launches, products)


def compiled_part(part: str, method: str, in_place: bool, length: int) -> Counts:
    """A compiled layer in both passes on ``length`` tokens, or what compiling changes in the loss of so many."""
    ask = [sys.executable, __file__, "--part", part, "--method", method, "--in_place", str(int(in_place))]
    few, more = (
        json.loads(
            subprocess.run(
                [*ask, "--length", str(length), "--tokens", str(tokens)], stdout=subprocess.PIPE, text=True, check=True
            ).stdout.splitlines()[-1]
        )
        for tokens in COMPILED_LENGTHS
    )
    short, long = COMPILED_LENGTHS
    size = more["bytes"] + (more["bytes"] - few["bytes"]) / (long - short) * (length - long)
    flops = sum(flops for flops, _ in more["products"])
    products = sum(seconds_of(*each) for each in more["products"])
    return Counts(flops, size / 1e9, more["launches"], products, more["copied"] / 1e9)


def table(method: str, length: int, folder: Path) -> None:
    """Print the rows of one method."""
    print(f"\n| {method} | TFLOP | GB | launches | plan's | simulated GiB | plan's | ms: operations | and bytes |")
    print("|---|---|---|---|---|---|---|---|---|")
    whole = workload_of(method, length, LAYERS, folder)
    for rung in rungs(method):
        workload = replace(whole, **rung.changes)
        seen = simulated(workload, rung.in_place)
        counts = counts_of(seen)
        planned = replace(workload, torch_compile=rung.compiled)
        real = "not simulated" if rung.compiled else f"{seen.tensors / GIB:.2f}"
        # Of 4-bit products torch counts nothing: they are those of lora.
        as_lora = replace(workload, method="lora") if method == "qlora" else workload
        if method == "qlora":
            other = counts_of(simulated(as_lora, rung.in_place))
            counts = replace(counts, flops=other.flops, products=other.products)
        if rung.compiled:  # the layers' own counts are replaced by those of their graphs
            few, more = (
                counts_of(
                    simulated(replace(workload_of(method, length, layers, folder), **rung.changes), rung.in_place)
                )
                for layers in (2, 4)
            )
            layer = compiled_part("layer", method, rung.in_place, length)
            plain = (more + few * -1) * 0.5
            if method == "qlora":
                layer, plain = (replace(each, flops=0.0, products=0.0) for each in (layer, plain))
            counts += (layer + plain * -1) * LAYERS
            tokens = min(chunk_tokens(workload), length)
            counts += compiled_part("loss", method, rung.in_place, tokens) * (length / tokens)
        step = speed.step(planned, H100)
        assert step
        cells = [rung.name, f"{counts.flops / 1e12:.1f}", f"{counts.gigabytes + counts.copied:.1f}"]
        cells += [f"{counts.launches:,.0f}", f"{step.launches:,.0f}", real, f"{predict(planned).tensors / GIB:.2f}"]
        cells += [f"{each:.0f}" for each in counts.milliseconds()]
        print(f"| {' | '.join(cells)} |", flush=True)


def layer_of(method: str, in_place: bool) -> tuple[Any, Any]:
    """A model with one layer of the 8B shape, and a function that runs the layer on a number of tokens."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    from kit.model.layers.lora_linear import install_lora_linear

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
    found = {type(module).__name__: module for module in model.modules()}

    def run(tokens: int) -> torch.Tensor:
        x = torch.randn(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        angles = found["LlamaRotaryEmbedding"](x, torch.arange(tokens)[None])
        with torch.autocast("cpu", torch.bfloat16, enabled=method != "full"):  # FSDP2 casts by itself
            return found["LlamaDecoderLayer"](x, attention_mask=None, position_embeddings=angles)

    return model, run


class Graphs:
    """What is in graphs that inductor makes: kernels, their bytes, products."""

    def __init__(self, length: int, forwards: int = 1) -> None:
        """
        Args:
            length: tokens for which products are counted, whatever number runs.
            forwards: how often a forward graph runs.
        """
        self.launches = self.bytes = self.copied = 0
        self.products: list[tuple[int, int]] = []
        self._length, self._forwards = length, forwards

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the graphs that are made in the ``with`` block."""
        from torch._inductor.graph import GraphLowering

        make = GraphLowering.codegen

        def counting(graph: Any) -> Any:
            result = make(graph)
            for node in graph.scheduler.nodes:
                kind = type(getattr(node, "node", None)).__name__
                if kind != "MultiOutput" and "Nop" not in type(node).__name__:
                    for _ in range(1 if graph.is_backward else self._forwards):
                        self._count(node)
            return result

        with patch.object(GraphLowering, "codegen", counting):
            yield

    def _count(self, node: Any) -> None:
        """Count a kernel. An extern one is a product, attention, or of 4-bit weights, whose bytes are not counted."""
        from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

        self.launches += 1
        if not node.is_extern():
            self.bytes += node.get_read_write_buffers_sizes()
            return
        name, inputs = node.node.python_kernel_name, node.node.inputs
        if "scaled_dot_product" in name:
            is_backward = "backward" in name
            shapes = [self._numbers(each.get_size()) for each in inputs[: 4 if is_backward else 3]]
            flops = (sdpa_backward_flop_count if is_backward else sdpa_flop_count)(*shapes)
            self.products.append((flops, 2 * sum(map(math.prod, shapes))))
        elif name.endswith(("mm", "add_product_.default")):
            shapes = [self._numbers(each.get_size()) for each in inputs]
            left, right = shapes[-2:]
            out = [*left[:-1], right[-1]]
            adds = len(shapes) == 3 and node.node.kwargs.get("beta") != 0
            size = 2 * sum(map(math.prod, (left, right, out, *([out] if adds else []))))
            self.products.append((2 * math.prod(left) * right[-1], size))
            if adds and name.endswith("addmm"):
                self.launches += 1
                self.copied += 4 * math.prod(out)

    def _numbers(self, shape: Any) -> list[int]:
        from sympy import sympify

        sizes = map(sympify, shape)
        return [int(each.subs(dict.fromkeys(each.free_symbols, self._length))) for each in sizes]


def count_part(part: str, method: str, in_place: bool, tokens: int, length: int) -> dict[str, Any]:
    """Count what is in the graphs of a layer in both passes, or of the loss of a chunk less what it has uncompiled."""
    import torch

    torch._inductor.config.force_disable_caches = True
    if part == "layer":
        from kit.model.layers.compile import Compiler

        model, run = layer_of(method, in_place)
        layers = Compiler()
        layers.compile_layers(model, ["LlamaDecoderLayer"])
        layers.is_on = True
        graphs = Graphs(length)
        with graphs.counted():
            run(tokens).sum().backward()
    else:
        from benchmarks.simulation.meter import Meter
        from kit.model.layers.compile import compiled
        from kit.model.layers.loss_head import _cross_entropy, _softmax_loss

        trains = method == "full"  # then the backward pass computes the losses again
        logits = torch.randn(tokens, 128_256, dtype=torch.bfloat16, requires_grad=trains)
        targets = torch.arange(tokens)

        def loss(function: Any) -> Any:
            return function(logits, targets).sum().backward() if trains else function(logits, targets)

        graphs = Graphs(length, forwards=2 if trains else 1)
        with graphs.counted():
            loss(compiled(_cross_entropy if trains else _softmax_loss))
        with Meter() as meter, meter.tally() as plain:
            loss(_cross_entropy if trains else _softmax_loss)
            if trains:
                _cross_entropy(logits, targets)
        graphs.launches -= plain.launches
        graphs.bytes -= plain.elementwise_bytes
    return {name: getattr(graphs, name) for name in ("launches", "bytes", "copied", "products")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", nargs="+", default=["lora", "qlora", "full"], choices=("lora", "qlora", "full"))
    parser.add_argument("--length", type=int, default=4096, help="tokens of the row")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--in_place", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        counted = count_part(options.part, options.method[0], bool(options.in_place), options.tokens, options.length)
        print(json.dumps(counted))
        return
    with tempfile.TemporaryDirectory() as folder:
        for method in options.method:
            table(method, options.length, Path(folder))


if __name__ == "__main__":
    main()
