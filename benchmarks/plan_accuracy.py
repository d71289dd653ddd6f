"""Compare the planner's formulas with memory and speed that other kits published for their own runs.

    python benchmarks/plan_accuracy.py

Needs no GPU and measures nothing. The formulas are those of ``kit plan``. Fields of ``Workload`` say what the other kit
ran: weights in bf16 without a float32 copy, all logits at once, compiled layers. For memory the sum of tensors is
compared, since a published peak is what torch's allocator counted. For speed the published number should lie in the
range. Where memory is more than 10 % off, or speed outside, the row says what is not modelled. No formula is fitted to
a row of memory.

Sources: torchtune's README (8B, 70B) and its table of optimisations (3B, 2 x 4,096 tokens, A100); torchtitan's
benchmarks/llama3_h100_202412_torchtitan.md and docs/performance.md; NeMo AutoModel's performance summary; LitGPT's
tutorials/resource-tables.md of October 2023 (Alpaca, whose longest sample has 1,304 tokens for Llama 2; bf16-true, no
checkpointing; torch's max_memory_allocated in GB); fsdp_qlora's benchmarks_03_2024.md (1,024 samples of given length;
rank 64 on all but o_proj, dropout, checkpointing). Of the last, 8.28 and 9.16 GiB are what was allocated, the other
peaks what the allocator had reserved.

Not used, since they do not say length, method or how memory was measured: LLaMA-Factory's table of hardware, PEFT's of
T0 and mt0, Unsloth's of VRAM, Qwen's of fine-tuning ("G" of an unnamed counter, on a model with code of its own).
"""

from dataclasses import dataclass, replace

from kit.memory.formulas import predict
from kit.memory.workload import Workload
from kit.strategy.strategies import DDP, FSDP2
from kit.tools.plan.hardware import GB, GPUS, Gpu
from kit.tools.plan.models import find_shape
from kit.tools.plan.speed import step

GIB = 2**30
A100, A100_40, A6000, H100 = GPUS["a100"], GPUS["a100-40"], GPUS["a6000"], GPUS["h100"]
RTX3090, RTX4090 = GPUS["rtx3090"], GPUS["rtx4090"]
TITAN_H100 = replace(H100, name="H100, HBM2e, 500 W", bandwidth=2400 * GB)


@dataclass(frozen=True)
class Row:
    """A published run."""

    name: str
    workload: Workload
    gpu: Gpu
    gib: float | None = None
    tokens_per_second: float | None = None  # of one GPU
    not_modelled: str = ""  # why the speed is outside
    memory_off: str = ""  # why the memory is more than 10 % off


def torchtune(size: str, **fields) -> Workload:
    """torchtune on one GPU: bf16 weights, and AdamW's moments in bf16 too."""
    values = dict(method="full", length=4096, rows=2, pure_bf16=True, loss="whole")
    return Workload(shape=find_shape(size), **(values | fields))


def torchtitan(shape: str, **fields) -> Workload:
    """torchtitan with FSDP2: float32 shards, bf16 products, all logits at once."""
    values = dict(method="full", strategy=FSDP2, num_gpus=64, length=8192, loss="whole")
    return Workload(shape=find_shape(shape), **(values | fields))


def litgpt(shape: str, **fields) -> Workload:
    """LitGPT on one GPU: adapters of rank 8 on queries and values, logits in chunks."""
    values = dict(length=1304, lora_r=8, lora_targets=("q_proj", "v_proj"), lora_dropout=True, loss="kept chunks")
    return Workload(shape=find_shape(shape), **(values | fields))


def fsdp_qlora(method: str, rows: int = 1, length: int = 2048, **fields) -> Workload:
    """fsdp_qlora on two GPUs: Llama 2 7B, adapters of rank 64, all logits at once."""
    targets = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    adapters = dict(method=method, lora_r=64, lora_targets=targets, lora_dropout=True)
    values = dict(strategy=FSDP2, num_gpus=2, gradient_checkpointing=True, loss="whole")
    return Workload(shape=find_shape("llama-2-7b"), rows=rows, length=length, **(adapters | values | fields))


# The MatMul4Bit of bitsandbytes 0.41 keeps the input of each product for the backward pass, that of today does not: of
# the inputs that nothing else keeps 1.2 GiB (7B) and 1.8 GiB (13B).
OLD_PRODUCTS = "bitsandbytes 0.41 kept the inputs of 4-bit products"
BOOST = "a 4090 does more than the share of its datasheet that is assumed, as in torchtune's rows"
RESERVED = "reserved, not allocated; float32 copies of logits in the transformers of its time; scales not quantised"
YI = replace(
    find_shape("llama-2-70b"),
    name="Yi 34B",
    num_layers=60,
    hidden_size=7168,
    intermediate_size=20480,
    num_heads=56,
    vocab_size=64000,
)
KEPT = dict(loss="kept chunks", torch_compile=True)
LORA = dict(length=2048, rows=2, lora_r=8, gradient_checkpointing=True, loss="kept chunks", torch_compile=True)
COMPILED = "the kit's compiled layers keep less than torchtune's (kit.model.layers.compile)"
SELECTIVE = "recomputes some products (selective checkpointing)"
ROWS = [
    Row("torchtune 3B full, packed", torchtune("llama-3b"), A100, 60.0, 7075),
    Row("  + compile", torchtune("llama-3b", torch_compile=True), A100, 51.0, 8998, memory_off=COMPILED),
    Row("  + chunked loss", torchtune("llama-3b", **KEPT), A100, 42.9, 9174, memory_off=COMPILED),
    Row("  + checkpointing", torchtune("llama-3b", gradient_checkpointing=True, **KEPT), A100, 24.9, 7210),
    Row(
        "torchtune 8B LoRA, no checkpointing",
        torchtune("llama-8b", **LORA | dict(method="lora", gradient_checkpointing=False)),
        A6000,
        30.3,
        4699,
        "not explained: 96 % of the datasheet's arithmetic by these counts",
    ),
    Row(
        "torchtune 8B LoRA",
        torchtune("llama-8b", **LORA | dict(method="lora")),
        RTX4090,
        16.2,
        3083,
        "not explained by these counts",
    ),
    Row(
        "torchtune 8B QLoRA",
        torchtune("llama-8b", **LORA | dict(method="qlora")),
        RTX4090,
        7.4,
        2413,
        "not explained by these counts",
    ),
    Row(
        "torchtitan 8B, 8 GPUs, 2 x 8192", torchtitan("llama-8b", num_gpus=8, rows=2), TITAN_H100, None, 5762, SELECTIVE
    ),
    Row(
        "  + compile", torchtitan("llama-8b", num_gpus=8, rows=2, torch_compile=True), TITAN_H100, None, 6667, SELECTIVE
    ),
    Row(
        "torchtitan 8B, 128 GPUs, 2 x 8192",
        torchtitan("llama-8b", num_gpus=128, rows=2),
        TITAN_H100,
        None,
        5605,
        SELECTIVE,
    ),
    Row("torchtitan 8B, 64 GPUs", torchtitan("llama-8b"), A100, None, 2973, SELECTIVE),
    Row(
        "torchtitan 70B, 64 GPUs, checkpointing", torchtitan("llama-70b", gradient_checkpointing=True), A100, None, 331
    ),
    Row("torchtitan 13B, 64 GPUs, 2 x 4096", torchtitan("llama-2-13b", rows=2, length=4096), A100, None, 2162),
    Row(
        "torchtitan 70B, 64 GPUs, 2 x 4096, checkpointing",
        torchtitan("llama-2-70b", rows=2, length=4096, gradient_checkpointing=True),
        A100,
        None,
        353,
    ),
    Row(
        "NeMo AutoModel 8B LoRA",
        Workload(shape=find_shape("llama-8b"), method="lora", lora_r=8, length=4096, rows=2),
        H100,
        None,
        12473,
    ),
    Row(
        "torchtune 70B LoRA, 8 GPUs",
        torchtune(
            "llama-70b",
            **LORA | dict(method="lora", lora_r=16, lora_targets=("q_proj", "k_proj", "v_proj")),
            pure_bf16=False,
            strategy=FSDP2,
            num_gpus=8,
        ),
        A100,
        27.6,
    ),
    Row("LitGPT 7B LoRA", litgpt("llama-2-7b", method="lora"), A100_40, 21.30 * GB / GIB),
    Row("  2 rows", litgpt("llama-2-7b", method="lora", rows=2), A100_40, 29.07 * GB / GIB),
    Row("  nf4-dq", litgpt("llama-2-7b", method="qlora"), A100_40, 13.84 * GB / GIB, memory_off=OLD_PRODUCTS),
    Row("LitGPT 13B LoRA", litgpt("llama-2-13b", method="lora"), A100_40, 38.12 * GB / GIB),
    Row("  nf4-dq", litgpt("llama-2-13b", method="qlora"), A100_40, 22.55 * GB / GIB, memory_off=OLD_PRODUCTS),
    Row("fsdp_qlora 7B LoRA, 2 GPUs, 512", fsdp_qlora("lora", length=512), RTX3090, 8.28),
    Row("  2048", fsdp_qlora("lora"), RTX3090, 9.16),
    Row("  DDP, 4 x 2048 (reserved)", fsdp_qlora("lora", 4, strategy=DDP), RTX4090, 22.04, 2399, BOOST),
    Row("fsdp_qlora 7B QLoRA, 10 x 2048", fsdp_qlora("qlora", 10), RTX4090, 20.97, 2250, BOOST, RESERVED),
    Row(
        "fsdp_qlora Yi 34B QLoRA, 2 x 2048",
        replace(fsdp_qlora("qlora", 2), shape=YI),
        RTX4090,
        23.05,
        506,
        BOOST,
        RESERVED,
    ),
]


def main() -> None:
    print("| run | GPU | GiB published | planned | error | tokens/s published | planned | outside |")
    print("|---|---|---|---|---|---|---|---|")
    for row in ROWS:
        cells = [row.name, row.gpu.name]
        if row.gib:
            planned = predict(row.workload).tensors / GIB
            reason = f": {row.memory_off}" if row.memory_off else ""
            cells += [f"{row.gib:.1f}", f"{planned:.1f}", f"{planned / row.gib - 1:+.0%}{reason}"]
        else:
            cells += ["", "", ""]
        found = step(row.workload, row.gpu)
        if row.tokens_per_second and found:
            low, high = found.tokens_per_second
            number = row.tokens_per_second
            off = "" if low <= number <= high else f"{number / (low if number < low else high) - 1:+.0%}"
            note = f"{off}: {row.not_modelled}" if off and row.not_modelled else off
            cells += [f"{number:,.0f}", f"{low:,.0f} to {high:,.0f}", note]
        else:
            cells += ["", "", ""]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
