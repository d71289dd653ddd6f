"""The memory of a run by formulas: of a GPU at its peak by component, of the host, and of the disk.

The components have the names by which a simulation measures them, so that both can be compared line by line.
"""

from dataclasses import dataclass, field

from kit.plan.workload import Workload

# What tensors take of a GPU. A simulation sees these, and not the rest.
TENSORS = (
    "trainable weights",
    "frozen weights",
    "4-bit weights",
    "buffers",
    "gradients",
    "optimiser",
    "gathered weights",
    "dequantised weights",
    "logits",
    "activations",
)
CONTEXT, FRAGMENTATION = "CUDA context", "fragmentation"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a run needs."""

    components: dict[str, int]  # of one GPU at its peak: those of ``TENSORS`` that are above 0, CONTEXT, FRAGMENTATION
    moment: str  # of the peak: "backward pass", "loss head" or "optimiser step"
    host: dict[str, int] = field(default_factory=dict)  # of one machine's memory, by what takes it
    disk: dict[str, int] = field(default_factory=dict)  # by what takes it

    @property
    def tensors(self) -> int:
        """Bytes of all tensors on one GPU at the peak: what a simulation measures."""
        return sum(size for name, size in self.components.items() if name in TENSORS)

    @property
    def peak(self) -> int:
        """Bytes that one GPU must have."""
        return sum(self.components.values())


def predict(workload: Workload) -> Memory:
    """Predict the memory of ``workload``."""
    raise NotImplementedError
