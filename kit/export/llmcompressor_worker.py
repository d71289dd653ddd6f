"""Quantise a model with llmcompressor, in a process and an environment of its own: ``compressed.py`` starts it.

The path of a JSON file that says what to do is the argument. llmcompressor shows its
progress, and the last line of what it prints says why it failed. Imports nothing of the kit.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Do what the file asks for."""
    asked = json.loads(Path(sys.argv[1]).read_text())

    import torch
    import transformers
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from torch.utils.data import DataLoader

    model = transformers.AutoModelForCausalLM.from_pretrained(asked["model"], dtype=asked["dtype"])
    scheme = preset_name_to_scheme(asked["scheme"], ["Linear"])
    weights = scheme.weights
    if weights.strategy == "group":
        weights.group_size = asked["group_size"]
        weights.strategy = "group" if weights.group_size else "channel"
    modifier = GPTQModifier if weights.type == "int" and asked["rows"] else QuantizationModifier
    rows: Any = [{"input_ids": torch.tensor(row)} for row in asked["rows"]]
    recipe = modifier(config_groups={"group_0": scheme}, ignore=asked["ignore"])
    dataset = DataLoader(rows) if rows else None
    oneshot(model=model, recipe=recipe, dataset=dataset, pipeline=None)  # layer by layer, if it needs rows
    model.save_pretrained(asked["folder"], save_compressed=True)


if __name__ == "__main__":
    main()
