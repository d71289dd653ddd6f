"""The kinds of adapters that ``adapter_type`` takes. Plain Python."""

import re

# Those that were trained, saved, opened again and merged, and compared with peft itself: benchmarks/adapters.py.
ADAPTER_TYPES = "lora oft c3a fourierft gralora hira hra ia3 loha lokr miss road vera".split()


def module_adapted_by(name: str) -> str:
    """Return the name of the adapted module if ``name`` is that of the tensor of its adapter that starts at zero.

    That is lora_B, lora_embedding_A of an embedding, and oft_R. While it is zero, the module answers as the base does.
    For any other weight the result is empty.
    """
    match = re.match(r"(?:base_model\.model\.)?(.+?)\.(?:lora_B|lora_embedding_A|oft_R)\.", name)
    return match[1] if match else ""
