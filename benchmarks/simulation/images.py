"""Images of a simulated run: the inputs of the tower by shape, and what its code reads from values.

A fake tensor has no values. Qwen's towers look into the grid of images, so functions that do are replaced.
"""

import os
from typing import Any

import numpy as np
import torch

from kit.memory.shape import Tower


def encoder_inputs(config: Any, tower: Tower, num_rows: int, image_tokens: int) -> dict[str, torch.Tensor]:
    """Return what the tower reads of ``image_tokens`` in each of ``num_rows`` rows, which are images of one size."""
    patches = num_rows * image_tokens * tower.patches_per_token
    if tower.token_pixels:
        side = tower.token_pixels // tower.patches_per_token
        assert side * 6 == tower.values_per_patch or side * 3 == tower.values_per_patch
        grid = torch.ones(num_rows, 3, dtype=torch.int64)
        return {"pixel_values": torch.empty(patches, tower.values_per_patch), "image_grid_thw": grid}
    size, seen = config.vision_config.image_size, tower.patches_seen
    assert seen
    number = patches // seen
    if hasattr(config, "scale_factor"):
        return {"pixel_values": torch.empty(num_rows, number // num_rows, 3, size, size)}
    return {"pixel_values": torch.empty(number, 3, size, size)}


def token_inputs(config: Any, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Return what the decoder needs of the tokens [B, T] beside."""
    if config.model_type.startswith("qwen"):
        return {"position_ids": torch.zeros(4, *shape, dtype=torch.int64)}
    if config.model_type == "gemma3":
        return {"token_type_ids": torch.zeros(shape, dtype=torch.int64)}
    return {}


def answer_for_values(image_tokens: int, tower: Tower) -> None:
    """Replace what Qwen's towers read from values: every row has an image of ``image_tokens``."""
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"  # whether there are as many placeholders as features
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2

    of_image = image_tokens * tower.patches_per_token

    def bounds(num_patches: int, length: int) -> np.ndarray:
        return np.append(np.arange(0, num_patches, length), num_patches)

    def seqlens(grid: Any, *args: Any, **kwargs: Any) -> tuple[np.ndarray, None]:
        return bounds(len(grid) * of_image, of_image), None

    def windows(grid: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, np.ndarray]:
        num_patches = len(grid) * of_image
        assert tower.patches_seen
        return torch.zeros(num_patches // tower.patches_per_token, dtype=torch.int64), bounds(
            num_patches, tower.patches_seen
        )

    def positions(grid: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(grid) * of_image, 2, dtype=torch.int64)

    def features(self: Any, pixel_values: torch.Tensor, image_grid_thw: Any = None, **kwargs: Any) -> Any:
        outputs = self.visual(pixel_values.type(self.visual.dtype), grid_thw=image_grid_thw, **kwargs)
        outputs.pooler_output = (outputs.pooler_output,)
        return outputs

    qwen2_5.get_vision_window_index = windows
    for module, model in ((qwen2_5, qwen2_5.Qwen2_5_VLModel), (qwen2, qwen2.Qwen2VLModel)):
        module.get_vision_attention_seqlens = seqlens
        module.get_vision_position_ids = positions
        model.get_image_features = features
