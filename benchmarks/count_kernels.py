"""Count the kernels of one compiled layer of Llama 8B in both passes, as inductor writes them for a GPU, without one.

    pip install --target ELSEWHERE --no-deps "triton==3.7.1"   # torch 2.13's; nothing of it runs
    PYTHONPATH=ELSEWHERE python benchmarks/count_kernels.py [--method lora qlora full] [--list] [--combine]

On one row of 4,096 tokens, with adapters of rank 16 on all seven matrices, under bf16 autocast, on tensors without
values (benchmarks/simulation/fake_cuda.py). Kernels are the calls in the code that inductor makes of a graph: Triton
kernels, and products, attention and operations of bitsandbytes. Each is one, but a product with a 4-bit weight, which
is four kernels for so many tokens. GB are what Triton kernels read and write.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.simulation.fake_cuda import fake_cuda  # noqa: E402

TOKENS = 4096
CALL = re.compile(r"^ {8}.*?(\w+\.run|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", re.MULTILINE)
PRODUCT_4BIT = "torch.ops.bitsandbytes.gemm_4bit.default"  # scales, their mean added, weights, product


class Counted(BaseException):
    """Raised where the first compiled graph would run; by then both are made."""


def one_layer(method: Any) -> Any:
    """A model of one layer as ``method`` trains it, on meta."""
    import torch
    from transformers import LlamaConfig

    from kit.config.recipe import Recipe
    from kit.model.adapters.adapter import attach_adapter
    from kit.model.build import on_meta
    from kit.model.four_bit import packed_on_meta
    from kit.model.layers.trained_linear import install_shared_casts, install_trained_linear

    values = json.loads((ROOT / "recipes/shapes/llama-8b/config.json").read_text())
    config = LlamaConfig(**(values | {"num_hidden_layers": 1, "vocab_size": 256, "dtype": "bfloat16"}))
    model = on_meta(config, "sdpa").to(torch.float32 if method == "full" else torch.bfloat16)
    if method == "qlora":
        model = packed_on_meta(model, torch.bfloat16)
    recipe = Recipe(model_name_or_path="x", dataset="x", output_dir="x", method=method)
    model = attach_adapter(model, recipe)
    if method == "full":
        install_shared_casts(model)
        install_trained_linear(model)
    return model.train()


def move(model: Any) -> None:
    """Move what is on meta to the device."""
    import torch

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                own = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
                module._parameters[name] = torch.nn.Parameter(own, parameter.requires_grad)
        if state := getattr(module, "quant_state", None):
            for each in (state, state.state2):
                for name, tensor in vars(each).items():
                    if isinstance(tensor, torch.Tensor):
                        setattr(each, name, torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda"))
            module.weight.quant_state = state


def count(method: str, lists: bool) -> str:
    """Return a row of the table."""
    import torch
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    from kit.model.layers.compile import Compiler

    cells = [method]

    def counted(graph: Any) -> ModuleType:
        code = graph.codegen()[0].value
        calls = CALL.findall(code)
        made = sum(each.get_read_write_buffers_sizes() for each in graph.scheduler.nodes if not each.is_extern())
        kernels = len(calls) + 3 * calls.count(PRODUCT_4BIT)
        own = sum(each.endswith(".run") for each in calls)
        cells.extend([str(kernels), str(own), f"{made / 1e9:.2f}"])
        if lists:
            print(f"{method}, {'backward' if graph.is_backward else 'forward'}:", *calls, sep="\n    ")
        module = ModuleType("graph")
        module.__file__ = os.devnull

        def call(_: Any) -> None:
            raise Counted

        vars(module)["call"] = call
        return module

    GraphLowering._compile_to_module = counted  # type: ignore[method-assign, assignment]
    model = one_layer(method)
    with FakeTensorMode(allow_non_fake_inputs=True):
        move(model)
        layers = Compiler()
        layers.compile_layers(model, ["LlamaDecoderLayer"])
        layers.is_on = True
        layer = next(module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer")
        empty = torch.empty(1, TOKENS, 4096, dtype=torch.bfloat16, device="cuda")
        angles = empty[..., :128].clone(), empty[..., :128].clone()
        try:
            with torch.autocast("cuda", torch.bfloat16):
                layer(empty.requires_grad_(), attention_mask=None, position_embeddings=angles)
        except Counted:
            torch._dynamo.reset()
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", nargs="+", default=["lora", "qlora", "full"])
    parser.add_argument("--list", action="store_true", help="print each call")
    parser.add_argument("--combine", action="store_true", help="with torch's combo_kernels")
    options = parser.parse_args()
    fake_cuda()
    import torch._functorch.config
    import torch._inductor.config

    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.combo_kernels = options.combine
    torch._functorch.config.force_non_lazy_backward_lowering = True
    print("| | forward | Triton | GB | backward | Triton | GB |\n|---|---|---|---|---|---|---|")
    for method in options.method:
        print(count(method, options.list), flush=True)


if __name__ == "__main__":
    main()
