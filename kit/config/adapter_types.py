"""The kinds of adapters that ``adapter_type`` takes. Plain Python.

They are peft's own modules around linear layers. Other kinds of peft were tried, and why each is refused is in
``values`` of kits/common.yaml and, with figures, in benchmarks/results/2026-11-25-adapters.md.
"""

import re
from typing import Literal, get_args

AdapterTypeName = Literal["lora", "oft"]
ADAPTER_TYPES: tuple[AdapterTypeName, ...] = get_args(AdapterTypeName)


def is_of_adapter(name: str) -> bool:
    """Whether the module or weight called ``name`` is of an adapter."""
    return bool(re.search(r"(?:^|\.)(?:lora|oft)_", name))


def module_adapted_by(name: str) -> str:
    """Return the name of the adapted module if ``name`` is that of the tensor of its adapter that starts at zero.

    That is lora_B, lora_embedding_A of an embedding, and oft_R. While it is zero, the module answers as the base does.
    For any other weight the result is empty.
    """
    match = re.match(r"(?:base_model\.model\.)?(.+?)\.(?:lora_B|lora_embedding_A|oft_R)\.", name)
    return match[1] if match else ""


def adapter_type_of(peft_type: str) -> AdapterTypeName | None:
    """The ``adapter_type`` of a saved adapter's ``peft_type``; None if there is none."""
    return next((name for name in ADAPTER_TYPES if name == peft_type.lower()), None)
