"""The optimisers: who builds each, what it keeps of a weight, and where it runs.

Promises: the only table of them. The setting ``optim`` lists its names; checks, plans and the optimiser itself read the
rest here.
"""

from typing import TYPE_CHECKING, Literal, NamedTuple


class Optimiser(NamedTuple):
    """What is known of an optimiser by its name."""

    # Makes it from the model, the groups of weights, the settings, the peak rate and the seed.
    build: str = "kit.train.optim.torch_adamw"
    bitsandbytes: str = ""  # the class of that library; empty: torch, or this kit, computes it
    num_moments: int = 2  # tensors of the size of a weight that it keeps
    moments_of_matrices: int | None = None  # the same of the layers' linear modules, where it differs
    in_8_bits: bool = False  # the moments of weights of 4,096 elements or more; else they have the weight's dtype
    paged: bool = False  # CUDA moves moments to host memory where the GPU's does not suffice
    update_bytes: int = 40  # that an update moves for each weight: it, its gradient, two moments, and their norm
    not_fsdp1: str = ""  # why FSDP1 cannot have it; empty: it can


_BITSANDBYTES = "kit.train.optim.of_bitsandbytes"
OPTIMISERS = {
    "adamw_torch": Optimiser(),
    "adamw_torch_fused": Optimiser(),
    "adamw_bf16": Optimiser(
        "kit.train.bf16_adamw.build",
        update_bytes=340,  # some forty operations, counted on fake tensors
        not_fsdp1="the flat parameters of FSDP1 do not say where in a weight a shard begins",
    ),
    "adamw_8bit": Optimiser(_BITSANDBYTES, "AdamW8bit", in_8_bits=True),
    "paged_adamw_8bit": Optimiser(_BITSANDBYTES, "PagedAdamW8bit", in_8_bits=True, paged=True),
    "paged_adamw_32bit": Optimiser(_BITSANDBYTES, "PagedAdamW32bit", paged=True),
    "muon": Optimiser(
        "kit.train.muon.build", moments_of_matrices=1, not_fsdp1="the flat parameters of FSDP1 have no matrices"
    ),
    "lion_8bit": Optimiser(_BITSANDBYTES, "Lion8bit", num_moments=1, in_8_bits=True),
    "lion_32bit": Optimiser(_BITSANDBYTES, "Lion32bit", num_moments=1),
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
# What is refused by name: the reason and what to use, by how names begin.
IN_BACKWARD = "a step clips by the norm of all gradients and is skipped if one is not finite, so none is updated before"
_SMALL = "use adamw_8bit or, with method full, adamw_bf16"
_NOT_OFFERED = {
    f"it projects whole gradients, and a shard has none; {_SMALL}": "galore q_galore qgalore apollo",
    f"its state has means of whole rows and columns, and a shard has none; {_SMALL}": "adafactor came",
    f"it needs a package that is not used here; {_SMALL}": "adam_mini optimi muonclip dist_muon dion",
    "it trains other weights than it evaluates; use lr_scheduler_type: constant": "schedule_free",
    f"{IN_BACKWARD}; {_SMALL}": "lomo adalomo",
    "use adamw_8bit": "adamw_torch_4bit ao_adamw",
    "use lion_32bit": "paged_lion_32bit paged_lion lion_pytorch",
    "use lion_8bit": "paged_lion_8bit",
    "use adamw_bf16": "adamw_anyprecision",
    "the same on other devices; use adamw_torch_fused": "adamw_torch_xla adamw_torch_npu",
    "not offered, since few fine-tune with it; use adamw_torch_fused": """
        sgd adam rmsprop adagrad lamb lars ademamix paged_ademamix grokadamw stable_adamw flash_adamw""",
}


def optimiser_of_other_kits(name: str) -> str:
    """Return what to use instead of the optimiser ``name`` of another kit; empty if none known here has it."""
    name = name.lower()
    if name in OTHER_NAMES:
        return f"use {OTHER_NAMES[name]}"
    starts = [
        (start, answer)
        for answer, words in _NOT_OFFERED.items()
        for start in words.split()
        if name == start or name.startswith(f"{start}_")
    ]
    return max(starts, key=lambda each: len(each[0]), default=("", ""))[1]
