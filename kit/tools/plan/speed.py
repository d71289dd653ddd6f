"""The time of a step by formulas: operations, bytes moved and bytes sent, against what a GPU and its links can do, and
kernels, against what the host can launch.

The bounds are a roofline's. A run reaches a part of them: ``PRODUCTS`` and ``PASSES`` say which, fitted to runs that
torchtitan (8 to 128 H100, 64 A100), torchtune (A100) and NeMo AutoModel (H100) published; benchmarks/plan_accuracy.py.
The project's own runs on an H100 are in benchmarks/results; none is fitted here, so every result is a range.
"""

import math
from dataclasses import dataclass

from kit.config.optimisers import OPTIMISERS
from kit.memory.activations import exchanged_kv_size, kept_by_all, offloaded
from kit.memory.formulas import EXPERTS_TOGETHER, cache_bytes, chunk_tokens
from kit.memory.operations import operations_per_token, orthogonalising_operations
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
LAUNCH_SECONDS = (5e-6, 12e-6)  # that the host takes to launch a kernel: assumed, and measured in FunASR's issue 3705


# Kernels that a layer of a Llama launches in a forward pass and in its backward pass, as it is and compiled, with
# adapters on all its matrices. Counted on fake GPUs (benchmarks/simulation, models of 1B, 3B and 8B), and in what
# inductor makes for a CPU (benchmarks/ladder.py).
LAUNCHES = {
    "full": ((46, 100), (17, 25)),
    "lora": ((67, 130), (45, 56.5)),
    "qlora": ((74, 144), (52, 70.5)),
}
RUN_LAUNCHES = 4  # of experts that are dequantised together, at least
CHUNK_LAUNCHES = (20, 28)  # of a chunk of the loss head, if it is frozen and if it trains


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimiser step of one GPU: seconds of its parts at the rates of datasheets."""

    # Of its samples, padding included; of pairs, of both halves. A token counts once, however many passes compute it.
    tokens: int
    products: float  # matrix products and attention
    elementwise: float  # norms, activations, casts, the loss
    optimiser: float  # and 4-bit weights that are converted for products, and experts that are read
    sent: float  # collectives, or copies of layers' inputs to the host and back
    exchanged: float  # all-to-alls of sequence parallelism: nothing is computed meanwhile
    host: float  # offloaded weights and optimiser
    launches: float  # of kernels, a number

    @property
    def seconds(self) -> tuple[float, float]:
        """The shortest and the longest time of the step.

        At best communication overlaps fully with computation; at worst a quarter of it does not. The GPU computes
        while the host launches what follows, so the longer of the two counts.
        """
        fast = max(self.products / PRODUCTS[1] + self.elementwise, self.sent / LINK_SHARE[1])
        slow = self.products / PRODUCTS[0] + self.elementwise + self.sent / LINK_SHARE[0] / 4
        slow = max(slow, self.sent / LINK_SHARE[0])
        fast, slow = (
            time + self.optimiser + self.exchanged / share
            for time, share in zip((fast, slow), reversed(LINK_SHARE), strict=True)
        )
        launching = [self.launches * seconds for seconds in LAUNCH_SECONDS]
        return max(fast, launching[0]) + self.host, max(slow, launching[1]) + 2 * self.host

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """Of one GPU, padding included: the lowest and the highest."""
        fast, slow = self.seconds
        return self.tokens / slow, self.tokens / fast


def step(workload: Workload, gpu: Gpu, supervised: float = 1.0, seen: float | None = None) -> Step | None:
    """Return the parts of a step; None for a GPU whose speed is not known. Arguments as of ``operations_per_token``."""
    if gpu.tflops is None or gpu.bandwidth is None:
        return None
    tokens = workload.tokens * workload.micro_batches
    bandwidth = gpu.bandwidth * MEMORY_SHARE
    return Step(
        tokens=tokens,
        products=tokens * operations_per_token(workload, supervised, seen) / (gpu.tflops * 1e12),
        elementwise=tokens * _elementwise_bytes(workload, supervised) / bandwidth,
        optimiser=_optimiser_bytes(workload) / bandwidth + _orthogonalising_seconds(workload, gpu),
        # They take different links, and both overlap with computation as far as they can.
        sent=max(collective_seconds(workload, gpu), _offloading_seconds(workload)),
        exchanged=exchange_bytes(workload) / gpu.link,
        host=_host_seconds(workload),
        launches=_launches(workload),
    )


def writing_seconds(workload: Workload, gpu: Gpu) -> tuple[float, float]:
    """Return the least seconds that a GPU of a known speed takes to generate the completions of a step, as a range.

    For each token a call reads all weights and, on average, half of the keys and values; or the host launches the
    kernels of a forward pass, which takes longer for small generation batches.
    """
    assert gpu.bandwidth is not None
    shape = workload.shape
    in_4_bits = shape.matrices if workload.method == "qlora" else 0
    read = workload.compute_bytes * shape.num_parameters + 2.5 * in_4_bits + cache_bytes(workload) / 2
    launches = shape.num_layers * LAUNCHES[workload.method][0][0]
    calls = math.ceil(workload.rows * workload.micro_batches / workload.generated_rows)
    fast, slow = (max(read / gpu.bandwidth / MEMORY_SHARE, launches * each) for each in LAUNCH_SECONDS)
    num_tokens = calls * min(workload.turns * workload.new_tokens, workload.length) / workload.rollout_steps
    return num_tokens * fast, num_tokens * slow


def _launches(workload: Workload) -> float:
    """Kernel launches of a step, without those of its optimiser and of collectives."""
    forward, backward = LAUNCHES[workload.method][workload.fuses]
    passes = 1 + workload.passes + (1 if workload.gradient_checkpointing else 0)
    chunks = math.ceil(workload.tokens / chunk_tokens(workload)) * (1 + workload.passes)
    layers = workload.shape.num_layers * (forward * passes + backward)
    if workload.method == "qlora" and (experts := workload.shape.experts):
        runs = sum(
            math.ceil(experts.number / max(1, EXPERTS_TOGETHER // (2 * each.num_weights))) for each in experts.products
        )
        layers += workload.shape.num_layers * RUN_LAUNCHES * runs * (passes + 1)
    return workload.micro_batches * (layers + chunks * CHUNK_LAUNCHES[workload.method == "full"])


def _elementwise_bytes(workload: Workload, supervised: float) -> float:
    """Bytes per token that elementwise operations read and write."""
    shape = workload.shape
    passes = PASSES_IF_FUSED if workload.fuses else PASSES
    again = 4 / 3 if workload.gradient_checkpointing else 1.0
    training = passes * again * kept_by_all(workload) + 30 * supervised * shape.vocab_size
    # A pass without gradients moves a third of it, as the forward pass that checkpointing repeats does.
    alone = passes / 3 * kept_by_all(workload) + 10 * supervised * shape.vocab_size
    return training + workload.passes * alone


def collective_seconds(workload: Workload, gpu: Gpu) -> float:
    """Seconds of a step's collectives at the rate of the links.

    FSDP gathers bf16 weights in each forward and in the backward pass of each micro-batch, and reduces float32
    gradients after the latter. DDP reduces float32 gradients once a step, and each of them is sent twice; so do the
    copies of hybrid sharding with their shards. Rings over several machines use the network adapters of all GPUs of a
    machine together; copies of one shard use that of one GPU. Each step of a ring costs ``RING_STEP`` more.
    """
    num, group = workload.num_gpus, workload.num_shards
    shape, trained = workload.shape, workload.trainable_parameters
    if num == 1:
        return 0.0
    batches = workload.micro_batches
    reductions = batches if workload.sharded and workload.sync_each_batch is not False else 1
    reduced = (group - 1) / group * reductions * 4 * trained
    replicas = num // group
    between = 2 * (replicas - 1) / replicas * 4 * trained / group
    copies = gpu.link if num <= workload.gpus_per_machine else gpu.network
    passes = 2 + workload.passes
    layers = float(workload.compute_bytes * (shape.num_parameters - shape.root_parameters))
    if workload.method != "full":
        layers += workload.compute_bytes * trained
    if workload.method == "qlora":
        layers -= (workload.compute_bytes - 0.5) * shape.matrices
    # Head and last norm stay gathered until the end of the next backward pass, and so does an embedding that is tied.
    embedding = 0 if shape.tied else workload.compute_bytes * shape.embedding_parameters
    once = workload.compute_bytes * shape.root_parameters - embedding
    gathered = (group - 1) / group * batches * (passes * (layers + embedding) + once)
    waits = (group - 1) * (reductions + passes * batches) + 2 * (replicas - 1)
    return (gathered + reduced) / _ring(workload, gpu) + between / copies + RING_STEP * (shape.num_layers + 2) * waits


def exchange_bytes(workload: Workload) -> float:
    """Bytes of the all-to-alls of sequence parallelism in a step: queries, keys and values, and the output."""
    n = workload.sequence_parallel_size
    width = 2 * workload.shape.query_size + 2 * exchanged_kv_size(workload)
    passes = 2 + workload.passes + (workload.gradient_checkpointing is True)
    tokens = workload.tokens * workload.micro_batches
    return (n - 1) / n * workload.compute_bytes * width * workload.shape.num_layers * tokens * passes


def _ring(workload: Workload, gpu: Gpu) -> float:
    """Bytes per second of a ring over the GPUs that share the weights."""
    here = workload.gpus_per_machine
    return gpu.link if workload.num_shards <= here else min(gpu.link, gpu.network * here)


def _optimiser_bytes(workload: Workload) -> float:
    """Bytes that the optimiser, the conversion of 4-bit weights, and reading experts move in a step."""
    size = OPTIMISERS[workload.optim].update_bytes
    moved = 0.0 if workload.strategy.offloads else size * workload.trainable_parameters / workload.num_shards
    passes = (3 if workload.gradient_checkpointing is True else 2) + workload.passes
    shape = workload.shape
    if workload.method == "qlora":  # each pass reads 4 bits, writes 16, and the product reads them
        moved += passes * workload.micro_batches * 4.5 * shape.matrices
    else:  # an expert has so few tokens that reading its weights takes longer than multiplying by them
        moved += passes * workload.micro_batches * workload.compute_bytes * (shape.matrices - shape.linear_weights)
    return moved


def _orthogonalising_seconds(workload: Workload, gpu: Gpu) -> float:
    """Seconds of Muon's Newton-Schulz iteration, for which sharded matrices are all-gathered in bf16."""
    if not (operations := orthogonalising_operations(workload)):
        return 0.0
    group = workload.num_shards
    gathered = 2 * workload.trained_in_matrices * (group - 1) / group
    return operations / (gpu.tflops or math.inf) / 1e12 + (gathered / _ring(workload, gpu) if group > 1 else 0.0)


def _offloading_seconds(workload: Workload) -> float:
    """Seconds of the copies of activation offload, to the host and back, without the last one's way back."""
    size = workload.tokens * offloaded(workload) * (2 * workload.shape.num_layers - 1)
    return workload.micro_batches * size / HOST_LINK


def _host_seconds(workload: Workload) -> float:
    """Seconds of CPU offload (FSDP): weights to the GPU and gradients back per micro-batch, AdamW on the host."""
    if not workload.strategy.offloads:
        return 0.0
    here = min(workload.num_gpus, workload.gpus_per_machine)
    trained = workload.trainable_parameters / workload.num_shards
    optimiser = 28 * trained * here / HOST_MEMORY
    weights = (4 if workload.method == "full" else 2) * workload.shape.num_parameters / workload.num_shards
    copied = workload.micro_batches * ((2 + workload.passes) * weights + 4 * trained)
    return copied / HOST_LINK + optimiser
