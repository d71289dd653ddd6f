"""The time of a step by formulas: operations, bytes moved and bytes sent, against what a GPU and its links can do.

The bounds are a roofline's. A run reaches a part of them: ``EFFICIENCY`` says which, from published runs of other kits.
Nothing here was measured on a GPU by this project, so every result is a range.
"""

from dataclasses import dataclass, replace

from kit.memory.activations import kept
from kit.memory.operations import forward_operations_per_token, operations_per_token
from kit.memory.workload import Workload
from kit.tools.plan.hardware import GB, Gpu

# Shares of the datasheet's dense bf16 arithmetic that matrix products and attention reach: the lower one is that of
# torchtitan on H100 limited to 500 W, the upper one a little above NeMo AutoModel, torchtune and torchtitan on A100.
PRODUCTS = (0.42, 0.75)
# How often each byte that a layer keeps is read or written by norms, activations, casts and residuals, in forward and
# backward pass. Fitted to the same runs, together with the shares above.
PASSES, PASSES_IF_FUSED = 12, 8
MEMORY_SHARE = 0.8  # of the memory's bandwidth that elementwise kernels reach: assumed
LINK_SHARE = (0.5, 0.85)  # of a link's rate that collectives of a layer's size reach: assumed
RING_STEP = 4e-6  # seconds that a step of a ring takes whatever its bytes: assumed
HOST_MEMORY = 100 * GB  # bytes per second of AdamW on the host, all processes of a machine together: assumed
HOST_LINK = 20 * GB  # bytes per second between a GPU and the host, PCIe 4.0 x16 less its overhead: assumed
SOURCE = (
    "datasheets, and shares fitted to runs that torchtitan (8 to 128 H100, 64 A100), torchtune (A100) and NeMo "
    "AutoModel (H100) published; benchmarks/plan_accuracy.py compares them"
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimiser step of one GPU: seconds of its parts at the rates of datasheets."""

    # Of its samples, padding included; of pairs, of both halves. A token counts once, however many passes compute it.
    tokens: int
    products: float  # matrix products and attention
    elementwise: float  # norms, activations, casts, the loss
    optimiser: float  # and 4-bit weights that are converted for products
    sent: float  # collectives
    host: float  # offloaded weights and optimiser
    passes_share: float = 0.0  # of the shortest time: the passes without gradients, which all numbers above contain

    @property
    def seconds(self) -> tuple[float, float]:
        """The shortest and the longest time of the step.

        At best all that is sent is hidden behind the computation; at worst a quarter of it is not.
        """
        fast = max(self.products / PRODUCTS[1] + self.elementwise, self.sent / LINK_SHARE[1])
        slow = self.products / PRODUCTS[0] + self.elementwise + self.sent / LINK_SHARE[0] / 4
        slow = max(slow, self.sent / LINK_SHARE[0])
        return fast + self.optimiser + self.host, slow + self.optimiser + 2 * self.host

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """Of one GPU, padding included: the lowest and the highest."""
        fast, slow = self.seconds
        return self.tokens / slow, self.tokens / fast

    @property
    def bound(self) -> str:
        """What takes longest: "arithmetic", "memory", "communication" or "host"."""
        parts = {
            "arithmetic": self.products / PRODUCTS[1],
            "memory": self.elementwise + self.optimiser,
            "communication": self.sent / LINK_SHARE[1],
            "host": self.host,
        }
        return max(parts, key=lambda name: parts[name])


def step(workload: Workload, gpu: Gpu, supervised: float = 1.0, seen: float | None = None) -> Step | None:
    """Return the parts of a step; None for a GPU whose speed is not known. Arguments as of ``operations_per_token``."""
    if gpu.tflops is None or gpu.bandwidth is None:
        return None
    tokens = workload.tokens * workload.micro_batches
    bandwidth = gpu.bandwidth * MEMORY_SHARE
    whole = Step(
        tokens=tokens,
        products=tokens * operations_per_token(workload, supervised, seen) / (gpu.tflops * 1e12),
        elementwise=tokens * _elementwise_bytes(workload, supervised) / bandwidth,
        optimiser=_optimiser_bytes(workload) / bandwidth,
        sent=collective_seconds(workload, gpu),
        host=_host_seconds(workload),
    )
    alone = forward_pass(workload, gpu, supervised, seen) if workload.passes else None
    share = workload.passes * alone.seconds[0] / whole.seconds[0] if alone else 0.0
    return replace(whole, passes_share=share)


def forward_pass(workload: Workload, gpu: Gpu, supervised: float = 1.0, seen: float | None = None) -> Step | None:
    """Return the parts of one pass without gradients over the samples of a step; else as ``step``."""
    if gpu.tflops is None or gpu.bandwidth is None:
        return None
    tokens = workload.tokens * workload.micro_batches
    bandwidth = gpu.bandwidth * MEMORY_SHARE
    return Step(
        tokens=tokens,
        products=tokens * forward_operations_per_token(workload, supervised, seen) / (gpu.tflops * 1e12),
        elementwise=tokens * _forward_bytes(workload, supervised) / bandwidth,
        optimiser=_conversion_bytes(workload, 1) / bandwidth,
        sent=_gathering_seconds(workload, gpu, 1),
        host=_host_forward_seconds(workload),
    )


def _elementwise_bytes(workload: Workload, supervised: float) -> float:
    """Bytes per token that all but products and attention read and write."""
    shape = workload.shape
    passes = PASSES_IF_FUSED if workload.fuses else PASSES
    again = 4 / 3 if workload.gradient_checkpointing else 1.0
    training = passes * again * shape.num_layers * kept(workload) + 30 * supervised * shape.vocab_size
    return training + workload.passes * _forward_bytes(workload, supervised)


def _forward_bytes(workload: Workload, supervised: float) -> float:
    """The same of one pass without gradients: a third, as of the forward pass that checkpointing repeats."""
    shape = workload.shape
    passes = PASSES_IF_FUSED if workload.fuses else PASSES
    return passes / 3 * shape.num_layers * kept(workload) + 10 * supervised * shape.vocab_size


def collective_seconds(workload: Workload, gpu: Gpu) -> float:
    """Seconds of a step's collectives at the rate of the links.

    FSDP gathers bf16 weights in each forward and in the backward pass of each micro-batch, and reduces float32
    gradients after the latter. DDP reduces float32 gradients once a step, and each of them is sent twice; so do the
    copies of hybrid sharding with their shards. Rings over several machines use the network adapters of all GPUs of a
    machine together; copies of one shard use that of one GPU. Each step of a ring costs ``RING_STEP`` beside.
    """
    num, group = workload.num_gpus, workload.num_shards
    shape, trained = workload.shape, workload.trainable_parameters
    if num == 1:
        return 0.0
    reductions = workload.micro_batches if workload.sharded and workload.sync_each_batch is not False else 1
    reduced = (group - 1) / group * reductions * 4 * trained
    replicas = num // group
    between = 2 * (replicas - 1) / replicas * 4 * trained / group
    copies = gpu.link if num <= workload.gpus_per_machine else gpu.network
    waits = (shape.num_layers + 2) * ((group - 1) * reductions + 2 * (replicas - 1))
    gathering = _gathering_seconds(workload, gpu, 2 + workload.passes)
    return gathering + reduced / _ring(workload, gpu) + between / copies + RING_STEP * waits


def _gathering_seconds(workload: Workload, gpu: Gpu, passes: int) -> float:
    """Seconds in which sharded weights are gathered for a number of passes over the micro-batches of a step."""
    group, shape = workload.num_shards, workload.shape
    plain = workload.compute_bytes
    trained = 0 if workload.method == "full" else workload.trainable_parameters
    layers = float(plain * (shape.num_parameters - shape.root_parameters + trained))
    if workload.method == "qlora":
        layers -= (plain - 0.5) * shape.num_layers * shape.layer_linear_weights
    # Head and last norm stay gathered until the end of the next backward pass, and so does an embedding that is tied.
    embedding = 0 if shape.tied else plain * shape.embedding_parameters
    once = plain * shape.root_parameters - embedding
    gathered = workload.micro_batches * (passes * (layers + embedding) + once)
    waits = (shape.num_layers + 2) * (group - 1) * passes * workload.micro_batches
    return (group - 1) / group * gathered / _ring(workload, gpu) + RING_STEP * waits


def _ring(workload: Workload, gpu: Gpu) -> float:
    """Bytes per second of a ring over the GPUs that share the weights."""
    here = workload.gpus_per_machine
    return gpu.link if workload.num_shards <= here else min(gpu.link, gpu.network * here)


def _optimiser_bytes(workload: Workload) -> float:
    """Bytes that the optimiser and the conversion of 4-bit weights move in a step."""
    # AdamW reads weight, gradient and two moments, and writes all but the gradient; the norm and its scaling take 12.
    moved = 0.0 if workload.strategy.offloads else 40.0 * workload.trainable_parameters / workload.num_shards
    passes = (3 if workload.gradient_checkpointing is True else 2) + workload.passes
    return moved + _conversion_bytes(workload, passes)


def _conversion_bytes(workload: Workload, passes: int) -> float:
    """Bytes that the conversion of 4-bit weights moves in a number of passes over the micro-batches of a step."""
    if workload.method != "qlora":
        return 0.0
    # Each pass reads 4 bits, writes bf16, and the product reads it.
    return passes * workload.micro_batches * 4.5 * workload.shape.num_layers * workload.shape.layer_linear_weights


def _host_seconds(workload: Workload) -> float:
    """Seconds that offloading adds: weights to the GPU and gradients back for each micro-batch, AdamW on the host."""
    if not workload.strategy.offloads:
        return 0.0
    here = min(workload.num_gpus, workload.gpus_per_machine)
    trained = workload.trainable_parameters / workload.num_shards
    optimiser = 28 * trained * here / HOST_MEMORY
    weights = (2 + workload.passes) * _host_forward_seconds(workload)
    return weights + workload.micro_batches * 4 * trained / HOST_LINK + optimiser


def _host_forward_seconds(workload: Workload) -> float:
    """Seconds that one pass over the micro-batches of a step waits for offloaded weights."""
    if not workload.strategy.offloads:
        return 0.0
    size = 4 if workload.method == "full" else 2
    return workload.micro_batches * size * workload.shape.num_parameters / workload.num_shards / HOST_LINK
