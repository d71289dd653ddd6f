"""Speed and memory of the kit on a GPU, lever by lever, beside its plan and beside TRL. See ``benchmarks/gpu.py``."""

import argparse
import copy
import json
import multiprocessing
import random
import statistics
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_bench import ROOT, Bench, Broken, Skipped, train
from throughput import make_model

from kit.config.recipe import Recipe
from kit.memory.workload import Workload
from kit.run.record import read_run
from kit.tools.plan.hardware import this_machine
from kit.tools.plan.models import read_shape
from kit.tools.plan.speed import step

SIZES, METHODS, KINDS = ("1b", "3b", "8b"), ("full", "lora", "qlora"), ("padded", "packed")
WARM_UP_STEPS = 5
DEFAULT = "default"  # none of the flags below: what a user gets who types none
# Each changes the time or the memory of a step and not what is learned, beyond rounding.
LEVERS: dict[str, dict[str, Any]] = {
    "plain": {"gradient_checkpointing": "false"},
    "checkpointing": {"gradient_checkpointing": "true"},
    "selective": {"gradient_checkpointing": "selective"},
    "compile": {"gradient_checkpointing": "false", "torch_compile": "true"},
    "all": {"gradient_checkpointing": "auto", "torch_compile": "true"},
}
# Of some runs only. What is not installed, or has no hardware here, is skipped with the run's own reason.
OTHER_LEVERS: dict[str, dict[str, Any]] = {
    "offload": {"gradient_checkpointing": "true", "activation_offload": "true"},
}
# These change what is learned, so their losses are not compared.
LOSSY: dict[str, dict[str, Any]] = {
    "fp8": {"gradient_checkpointing": "false", "torch_compile": "true", "fp8": "true"},
    "bf16-weights": {"gradient_checkpointing": "true", "optim": "adamw_bf16"},
}
FLAGS = {DEFAULT: {}} | LEVERS | OTHER_LEVERS | LOSSY
LARGEST_DIFFERENCE = 0.01  # of a loss, from that of the plain run


@dataclass(frozen=True)
class Case:
    """A run to measure."""

    size: str
    method: str
    kind: str
    lever: str

    @property
    def name(self) -> str:
        """Of its part."""
        return f"{self.size}-{self.method}-{self.kind}-{self.lever}"


def cases() -> list[Case]:
    """All runs: the defaults; each lever alone for adapters on the large model, and none and all of them elsewhere."""
    found = [
        Case(size, method, "packed", DEFAULT) for size, method in (("8b", "lora"), ("8b", "qlora"), ("1b", "full"))
    ]
    found += [Case("8b", "lora", kind, lever) for kind in ("packed", "padded") for lever in LEVERS]
    found += [Case("8b", "lora", "packed", lever) for lever in ("offload", "fp8")]
    found += [Case("3b", "full", "packed", lever) for lever in ("fp8", "bf16-weights")]
    found += [
        Case(size, method, kind, lever)
        for size in SIZES
        for method in METHODS
        for kind in KINDS
        for lever in ("plain", list(LEVERS)[-1])
    ]
    return list(dict.fromkeys(found))


def measure(bench: Bench, case: Case) -> dict[str, Any]:
    """Train some steps, and return what was measured and what the plan says.

    Returns:
        ``losses``, and of the steps after the first ``WARM_UP_STEPS``: ``tokens_per_second`` with padding (as the plan
        counts) and ``useful_tokens_per_second`` without, ``tflops_per_second`` (medians), ``peak_bytes``. Of the plan
        ``planned_tokens_per_second`` (lowest, highest) and ``planned_bytes``, if it knows this GPU.
    """
    model, data, lengths = _inputs(bench, case.size)
    output = bench.folder / case.name
    flags = {
        "model_name_or_path": model,
        "dataset": data,
        "method": case.method,
        "packing": str(case.kind == "packed").lower(),
        "max_length": 64 if bench.rehearse else 4096,
        "excess_length_strategy": "truncate",
        "per_device_train_batch_size": 1 if case.kind == "packed" else 2,
        "global_batch_size": 2 if bench.rehearse else bench.samples,
        "learning_rate": 1e-5 if case.method == "full" else 1e-4,
        "warmup_steps": 0,
        "lr_scheduler_type": "constant",
    }
    num_steps = WARM_UP_STEPS + (1 if bench.rehearse else bench.steps)
    rows = train(output, num_steps, **flags | FLAGS[case.lever])
    timed = rows[WARM_UP_STEPS:]
    useful = statistics.median(row["tokens_per_second"] for row in timed)
    padding = statistics.mean(row.get("padding_share", 0.0) for row in timed)
    measured: dict[str, Any] = {
        "losses": [row["loss"] for row in rows],
        "tokens_per_second": useful / (1 - padding),
        "useful_tokens_per_second": useful,
        "tflops_per_second": statistics.median(row["tflops_per_second"] for row in timed),
        "peak_bytes": max(row["peak_memory_bytes"] for row in rows),
    }
    recipe, _ = read_run(output / "run.json")
    workload = Workload.of(recipe, read_shape(model / "config.json", case.size))
    plan = json.loads((output / "run.json").read_text()).get("plan", {})
    found = this_machine()
    seen = sum(length**2 for length in lengths) / sum(lengths)
    planned = step(workload, found[0], seen=seen) if found and found[0].is_known and not bench.rehearse else None
    if planned and plan:
        measured |= {"planned_tokens_per_second": planned.tokens_per_second, "planned_bytes": plan["tensors"]}
    return measured


def _inputs(bench: Bench, size: str) -> tuple[Path, Path, list[int]]:
    """A random model of a public shape, rows of text of lognormal lengths for its tokenizer, and their tokens."""
    from transformers import AutoTokenizer

    model, data = bench.folder / f"model-{size}", bench.folder / f"rows-{size}.jsonl"
    longest = 64 if bench.rehearse else 4096
    if not model.exists():
        # In a process of its own, which leaves nothing on the GPU; in a folder of another name until it is whole.
        partial = model.with_suffix(".partial")
        shape = "tiny" if bench.rehearse else f"llama-{size}"
        process = multiprocessing.get_context("fork").Process(target=make_model, args=(partial, shape))
        process.start()
        process.join()
        if process.exitcode:
            raise Broken(f"no model of shape {shape}: status {process.exitcode}")
        partial.rename(model)
    rng = random.Random(0)
    num_rows = 4 * (WARM_UP_STEPS + bench.steps) * bench.samples  # a pack holds 2.6 of them
    counts = [min(longest, max(8, int(rng.lognormvariate(6.2, 1.0) * longest / 4096))) for _ in range(num_rows)]
    texts = [" ".join(rng.choices(("Maria", "Oslo", "honey"), k=count)) for count in counts]
    tokenizer = AutoTokenizer.from_pretrained(model)
    lengths = [len(ids) for ids in tokenizer(texts)["input_ids"]]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    # For the comparison with TRL, those that fit: the two sides cut longer ones differently. With this tokenizer only
    # the kit would begin them with BOS.
    fitting = [text.split() for text, length in zip(texts, lengths, strict=True) if length + 8 <= longest]
    pairs = [
        {
            "prompt": tokenizer.bos_token + " ".join(words[: len(words) // 4]),
            "completion": " ".join(words[len(words) // 4 :]),
        }
        for words in fitting
    ]
    data.with_name(f"pairs-{size}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return model, data, [min(longest, length) for length in lengths]


def verdict(found: dict[str, Any], plain: dict[str, Any] | None) -> str:
    """What a measured run says of the plan, and of its losses beside those of the plain run."""
    faults = []
    if plain:
        pairs = zip(found["losses"], plain["losses"], strict=True)
        worst = max(abs(a - b) / abs(b) for a, b in pairs)
        faults += [f"loss differs by {worst:.1%}"] if worst > LARGEST_DIFFERENCE else []
    if "planned_bytes" not in found:
        return "; ".join(faults) or "no plan here"
    low, high = found["planned_tokens_per_second"]
    if not low <= found["tokens_per_second"] <= high:
        faults.append(f"{'slower' if found['tokens_per_second'] < low else 'faster'} than planned")
    error = found["peak_bytes"] / found["planned_bytes"] - 1
    if abs(error) > 0.05:
        faults.append(f"memory {error:+.0%} of the plan")
    return "; ".join(faults) or "as planned"


# Milliseconds of a step of 8B LoRA on one row of 4,096 tokens without checkpointing, by the roofline of an H100:
# computed from what fake devices count, not measured. First without these levers, then what they can reach.
LEDGER = {
    "products": (179, 179),
    "RMSNorm": (48, 4),
    "LoRA": (65, 32),
    "attention, padded": (24, 24),
    "attention, packed": (47, 24),
    "SwiGLU": (20, 11),
    "rotary": (12, 2),
    "loss head": (10, 3),
    "rest of the layers": (5, 2),
}


def ledger(bench: Bench) -> dict[str, Any]:
    """Time each kind of work of ``LEDGER`` alone, forward and backward, eager and compiled; milliseconds of a step."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from kit.model.adapters.adapter import attach_adapter
    from kit.model.layers.attention import varlen_attention
    from kit.model.layers.loss_head import install_loss_head

    config = AutoConfig.from_pretrained(ROOT / "recipes" / ("tiny/model" if bench.rehearse else "shapes/llama-8b"))
    num_layers, config.num_hidden_layers = config.num_hidden_layers, 1
    tokens = 64 if bench.rehearse else 4096
    dtype = torch.float32 if bench.rehearse else torch.bfloat16
    with torch.device(bench.device):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    base.config.use_cache = False
    attach_adapter(base, Recipe(model_name_or_path="none", dataset="none", method="lora", output_dir="none"))
    memory = None if bench.rehearse else torch.cuda.get_device_properties(bench.device).total_memory
    install_loss_head(base, device_memory=memory)
    layer = base.model.layers[0]
    h, f = config.hidden_size, config.intermediate_size
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or h // heads

    def states(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=bench.device, dtype=dtype, requires_grad=True)

    def timed(function: Any, *inputs: torch.Tensor, compiled: bool = False) -> float:
        run = torch.compile(function) if compiled else function
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=not bench.rehearse):
            made = run(*inputs)
        arriving = torch.randn_like(made)

        def both_passes() -> None:
            for each in inputs:
                each.grad = None  # else each pass would add to it
            with torch.autocast(bench.device.type, torch.bfloat16, enabled=not bench.rehearse):
                made = run(*inputs)
            made.backward(arriving)

        return bench.milliseconds(both_passes)

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return varlen_attention(
            layer.self_attn, q, k, v, None, is_causal=True, cu_seq_lens_q=bounds, max_length_q=tokens
        )[0]

    def padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    bounds = torch.tensor([0, tokens], dtype=torch.int32, device=bench.device)
    q, k, v = (states(1, num, tokens, size) for num in (heads, groups, groups))
    cos, sin = base.model.rotary_emb(q, torch.arange(tokens, device=bench.device)[None])
    ids = torch.randint(0, config.vocab_size, (1, tokens), device=bench.device)
    adapted = [module for module in layer.modules() if hasattr(module, "base_layer")]
    inputs = {module: states(1, tokens, module.base_layer.in_features) for module in adapted}
    head = copy.deepcopy(base.lm_head)
    head.__dict__.pop("forward", None)  # the plain product, without losses
    # What the loss of all tokens takes beyond that of one, and beyond the head's product.
    ids_of = {
        count: {"target_positions": torch.arange(count, device=bench.device), "targets": ids[0, :count]}
        for count in (1, tokens)
    }

    def losses(count: int) -> Any:
        embedded = states(1, tokens, h)
        return timed(lambda x: base(inputs_embeds=x, **ids_of[count]), embedded)

    def work(compiled: bool) -> dict[str, float]:
        found = {
            "RMSNorm": timed(layer.input_layernorm, states(1, tokens, h), compiled=compiled) * (2 * num_layers + 1),
            "attention, padded": timed(padded, q, k, v) * num_layers,
            "attention, packed": timed(packed, q, k, v) * num_layers,
            "SwiGLU": timed(
                lambda gate, up: layer.mlp.act_fn(gate) * up,
                states(1, tokens, f),
                states(1, tokens, f),
                compiled=compiled,
            )
            * num_layers,
            "rotary": timed(
                lambda q, k: torch.cat([each.flatten() for each in apply_rotary_pos_emb(q, k, cos, sin)]),
                q,
                k,
                compiled=compiled,
            )
            * num_layers,
        }
        products = sum(timed(module.base_layer, inputs[module]) for module in adapted) * num_layers
        with_adapters = sum(timed(module, inputs[module], compiled=compiled) for module in adapted) * num_layers
        of_head = timed(head, states(1, tokens, h))
        found["products"] = products + of_head
        found["LoRA"] = with_adapters - products
        found["loss head"] = losses(tokens) - losses(1) - of_head
        whole = timed(
            lambda x: layer(x, position_embeddings=(cos, sin), attention_mask=None),
            states(1, tokens, h),
            compiled=compiled,
        )
        parts = found["RMSNorm"] * 2 * num_layers / (2 * num_layers + 1) + products + found["LoRA"]
        parts += found["attention, padded"] + found["SwiGLU"] + found["rotary"]
        found["rest of the layers"] = whole * num_layers - parts
        return {name: found[name] for name in LEDGER}

    measured: dict[str, Any] = {"eager": work(compiled=False)}
    if not bench.rehearse:
        measured["compiled"] = work(compiled=True)
    return measured


def beside_trl(bench: Bench, size: str, method: str, levers: bool) -> dict[str, Any]:
    """A row of ``benchmarks/against_trl.py`` as text: both sides' defaults, or both sides' levers."""
    import against_trl

    for package in ("trl", "liger-kernel") if levers else ("trl",):
        if find_spec(package.replace("-", "_")) is None:
            raise Skipped(f"{package} is not installed")
    model, data, _ = _inputs(bench, size)
    args = argparse.Namespace(
        model=str(model),
        columns="prompt,completion",
        dataset=str(data.with_name(f"pairs-{size}.jsonl")),
        max_length=64 if bench.rehearse else 4096,
        micro_batch=1,
        global_batch_size=2 if bench.rehearse else bench.samples,
        steps=6 if bench.rehearse else WARM_UP_STEPS + bench.steps,
        rounds=1 if bench.rehearse else bench.rounds,
        out=None,
        theirs={"use_liger_kernel": True, "torch_compile": True} if levers else {},
    )
    if method == "lora" and not bench.rehearse:  # the kit's frozen weights are in bf16 too
        args.theirs["model_init_kwargs"] = {"dtype": "bfloat16"}
    args.data = against_trl.write_data(bench.folder / f"trl-{size}.jsonl", args)
    ours = LEVERS[list(LEVERS)[-1]] if levers else {}
    return {"row": against_trl.row(method, args, **ours)}
