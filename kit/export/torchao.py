"""Write a model with weights quantised by torchao, as ``qat`` trains for, in files that transformers opens.

Promises: the written model, opened again, is compared with the fake quantisation of training; and the loss before and
after quantisation is reported.
"""

from pathlib import Path
from typing import Any

import torch

from kit.config.settings.method import MethodSettings
from kit.export.proof import Rows, change_between, score
from kit.model.adapters.qat import install_qat, layers, quantised_as


def write(
    model: Any, plain: Path, folder: Path, settings: MethodSettings, rows: Rows, opener: Any
) -> tuple[Any, list[str]]:
    """Quantise the model in ``plain``, and write it.

    Args:
        model: as plain transformers opened it; it computes with fake-quantised weights afterwards.
        settings: of the full model, with ``qat``.
        opener: the class that opens it.

    Returns:
        The scores of ``rows`` that training would compute; and lines for the user.
    """
    from transformers import TorchAoConfig

    before = score(model, rows, as_stored=True)
    names = layers(model)
    kept = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name not in names]
    install_qat(model, settings)
    expected = score(model, rows, as_stored=True)
    how = TorchAoConfig(quantised_as(settings), modules_to_not_convert=kept)
    quantised = opener.from_pretrained(plain, dtype=model.dtype, quantization_config=how)
    quantised.save_pretrained(folder)
    losses = [-scores.mean() for scores in (before, expected)]
    sizes = [sum(path.stat().st_size for path in each.glob("*.safetensors")) for each in (plain, folder)]
    return expected, [
        f"{settings.qat} in {len(names)} layers: {sizes[0] / 1e6:,.1f} MB of weights become {sizes[1] / 1e6:,.1f} MB",
        f"loss {losses[0]:.4f} before quantisation, {losses[1]:.4f} after it: {change_between(before, expected)}",
    ]
