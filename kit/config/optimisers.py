"""The optimisers: how each is built, its state per weight, and where it runs.

Promises: the only table of them. The setting ``optim`` lists its names; checks, plans and the optimiser itself read the
rest here.
"""

from typing import TYPE_CHECKING, Literal, NamedTuple


class Optimiser(NamedTuple):
    """Properties of an optimiser."""

    # Builds it from the model, the parameter groups, the settings, the peak learning rate and the seed.
    build: str = "kit.train.optim.optim.torch_adamw"
    bitsandbytes: str = ""  # the class of that library; empty: torch, or this kit, computes it
    num_moments: int = 2  # tensors of the size of a weight that it keeps
    moments_of_matrices: int | None = None  # the same of the layers' linear modules, where it differs
    in_8_bits: bool = False  # the moments of weights of 4,096 elements or more; else they have the weight's dtype
    paged: bool = False  # CUDA moves moments to host memory where the GPU's does not suffice
    update_bytes: int = 40  # that an update moves for each weight: it, its gradient, two moments, and their norm
    takes_adamw_rates: bool = True  # the default rates, which are for AdamW, suit it too
    not_fsdp1: str = ""  # why FSDP1 cannot have it; empty: it can


_BITSANDBYTES = "kit.train.optim.optim.of_bitsandbytes"
OPTIMISERS = {
    "adamw_torch": Optimiser(),
    "adamw_torch_fused": Optimiser(),
    "adamw_bf16": Optimiser(
        "kit.train.optim.bf16_adamw.build",
        update_bytes=340,  # some forty operations, counted on fake tensors
        not_fsdp1="FSDP1's flat parameters hide where in a weight a shard begins",
    ),
    "adamw_8bit": Optimiser(_BITSANDBYTES, "AdamW8bit", in_8_bits=True),
    "paged_adamw_8bit": Optimiser(_BITSANDBYTES, "PagedAdamW8bit", in_8_bits=True, paged=True),
    "paged_adamw_32bit": Optimiser(_BITSANDBYTES, "PagedAdamW32bit", paged=True),
    "muon": Optimiser(
        "kit.train.optim.muon.build", moments_of_matrices=1, not_fsdp1="FSDP1's flat parameters are not matrices"
    ),
    "lion_8bit": Optimiser(_BITSANDBYTES, "Lion8bit", num_moments=1, in_8_bits=True, takes_adamw_rates=False),
    "lion_32bit": Optimiser(_BITSANDBYTES, "Lion32bit", num_moments=1, takes_adamw_rates=False),
}
if TYPE_CHECKING:
    OptimiserName = str
else:
    OptimiserName = Literal[tuple(OPTIMISERS)]

# What other kits and transformers call an optimiser of this table.
OTHER_NAMES = {
    "adamw": "adamw_torch_fused",
    "adamw_hf": "adamw_torch",
    "adamw_apex_fused": "adamw_torch_fused",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw_torch_8bit": "adamw_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "lion": "lion_32bit",
}
