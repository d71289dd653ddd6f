"""Images of a simulated run: the inputs of the encoder by shape, and the values that its code reads.

Encoders look into sizes of images: how many patches to cut off, where rows begin. So integers whose values are known
keep them, as fake tensors do with single numbers.
"""

import os
from inspect import signature
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from kit.memory.shape import Tower

_MOST_VALUES = 1 << 22


def encoder_inputs(config: Any, tower: Tower, num_rows: int, image_tokens: int) -> dict[str, torch.Tensor]:
    """Return what the encoder reads of ``image_tokens`` in each of ``num_rows`` rows, which are images of one size."""
    vision, patches = config.vision_config, image_tokens * tower.patches_per_token
    if not tower.token_pixels:
        side = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
        assert tower.patches_seen
        pixels, squares = (3, side, side), round(patches / tower.patches_seen)
        if config.model_type in ("llava_next", "llava_onevision"):  # the whole image, and the squares it is cut into
            size = torch.tensor([[side * (squares - 1), side]] * num_rows)
            return {"pixel_values": torch.empty(num_rows, squares, *pixels), "image_sizes": size}
        if config.model_type in ("idefics3", "smolvlm"):
            return {"pixel_values": torch.empty(num_rows, squares, *pixels)}
        return {"pixel_values": torch.empty(num_rows * squares, *pixels)}
    per_side = round(tower.patches_per_token**0.5)
    rows = max(n for n in range(1, image_tokens + 1) if n * n <= image_tokens and not image_tokens % n)
    grid = torch.tensor([[rows * per_side, image_tokens // rows * per_side]] * num_rows)
    if vision.model_type == "pixtral":
        height, width = (int(n) * vision.patch_size for n in grid[0].tolist())
        return {"pixel_values": torch.empty(num_rows, 3, height, width), "image_sizes": grid * vision.patch_size}
    flat = torch.empty(num_rows, patches, tower.values_per_patch)
    if vision.model_type == "gemma4_vision":
        places = torch.cartesian_prod(*(torch.arange(n) for n in grid[0].tolist()))
        return {"pixel_values": flat, "image_position_ids": places.expand(num_rows, -1, -1)}
    if vision.model_type == "siglip2_vision_model":
        mask = torch.ones(num_rows, patches, dtype=torch.int64)
        return {"pixel_values": flat, "pixel_attention_mask": mask, "spatial_shapes": grid}
    frames = torch.ones(num_rows, 1, dtype=torch.int64)
    return {"pixel_values": flat.flatten(0, 1), "image_grid_thw": torch.cat([frames, grid], 1)}


def token_inputs(model: Any, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Return what the decoder needs of the tokens [B, T] beside."""
    inputs = {}
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in signature(type(model.model).forward).parameters:
            inputs[name] = torch.zeros(shape, dtype=torch.int64)
    if hasattr(model.model, "get_rope_index"):
        inputs["position_ids"] = torch.zeros(4, *shape, dtype=torch.int64)
    return inputs


def placeholder_id(config: Any) -> int:
    """Return the id of the token that stands for a part of an image."""
    return next(getattr(config, key) for key in ("image_token_id", "image_token_index") if hasattr(config, key))


def keep_integers() -> None:
    """Let integers be known through all operations on them, and skip the count of placeholders, which are not."""
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"

    def may_turn_const(self: Any, tensor: torch.Tensor) -> bool:
        most = 1 if tensor.is_floating_point() else _MOST_VALUES
        return tensor.numel() <= most and not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"

    FakeTensorMode.may_turn_const = may_turn_const  # type: ignore[method-assign]
    aten = torch.ops.aten
    made = (aten.arange, aten.zeros, aten.ones, aten.full)
    dispatch = FakeTensorMode.dispatch

    def dispatched(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}

        def known(real: torch.Tensor) -> Any:
            return self.fake_tensor_converter.from_real_tensor(self, real, make_constant=True)

        if getattr(func, "overloadpacket", None) in made and str(kwargs.get("device")) != "meta":
            with torch._C._DisableTorchDispatch():
                real = func(*args, **{**kwargs, "device": "cpu"})
            if not real.is_floating_point() and real.numel() <= _MOST_VALUES:
                return known(real)
        if func is aten.ne.Scalar and args[0].constant is None and args[0].numel() < 1024:  # squares: none is empty
            with torch._C._DisableTorchDispatch():
                real = torch.ones(args[0].shape, dtype=torch.bool)
            return known(real)
        if func is aten.index.Tensor and any(map(_is_mask, args[1])):  # the places of what is true; if not known, all
            places: list[Any] = []
            for each in args[1]:
                if _is_mask(each):
                    with torch._C._DisableTorchDispatch():
                        mask = torch.ones(each.shape) if each.constant is None else each.constant
                        found = mask.nonzero().unbind(1)
                    places += map(known, found)
                else:
                    places.append(each)
            args = (args[0], places)
        return dispatch(self, func, types, args, kwargs)

    FakeTensorMode.dispatch = dispatched  # type: ignore[method-assign]


def _is_mask(index: Any) -> bool:
    return isinstance(index, FakeTensor) and index.dtype == torch.bool
