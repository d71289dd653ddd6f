"""How a process must load its weights."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """How this process must load weights; ``kit.model.load`` obeys it and knows no strategy."""

    compute_dtype: Literal["float32", "bfloat16"]  # frozen weights, and the storage type of 4-bit ones
    device: str  # where the weights go when loaded
