"""Tiled MLP (ALST), for ``tiled_mlp``: MLP and norms in sequence chunks; they make the largest tensors of a long row.

They map each token by itself, so their backward pass can be made for one tile of tokens after another. Each tile keeps
its input and computes the rest again. As in https://arxiv.org/abs/2506.13996, section 3.1.1.

Promises: a value is the same sum as without tiles; a kernel may add up a short last tile in another order. The gradient
of a weight adds up the tiles' parts, so its last bits differ. Dropout in adapters uses other masks. Importing this
needs no torch, so that memory can be planned without it.
"""

from functools import partial
from typing import Any

from kit.system.errors import Problem

TILE = 4096  # tokens: products of as many rows keep a GPU busy


def check_tiled_mlp(model: Any) -> list[Problem]:
    """Return a problem if ``model``, which may be on meta, has a decoder layer without an MLP that can be tiled."""
    if len(_mlps(model)) == model.config.get_text_config().num_hidden_layers:
        return []
    found = f"true, but layers of {type(model).__name__} have no gated MLP such as Llama's"
    return [Problem("tiled_mlp", found, fix="--tiled_mlp false")]


def install_tiled_mlp(model: Any) -> None:
    """Let MLPs and norms of ``model`` compute in chunks. Call this after adapters are attached."""
    hidden_size = model.config.get_text_config().hidden_size
    named = (each for each in model.modules() if "Norm" in type(each).__name__)
    # Some norms have no weight, and norms of heads one [heads, size of a head].
    norms = [each for each in named if getattr(getattr(each, "weight", None), "shape", None) == (hidden_size,)]
    for module in (*_mlps(model), *norms):
        module.forward = partial(_in_tiles, module.forward)


def _mlps(model: Any) -> list[Any]:
    mlps = (module for name, module in model.named_modules() if name.rpartition(".")[2] == "mlp")
    return [mlp for mlp in mlps if hasattr(mlp, "down_proj")]


def _in_tiles(forward: Any, states: Any) -> Any:
    """``forward`` of ``states`` [B, T, h], by tiles of the B * T tokens."""
    import torch
    from torch.utils.checkpoint import checkpoint

    if states.shape[:-1].numel() <= TILE:
        return forward(states)
    tiles = states.reshape(1, -1, states.shape[-1]).split(TILE, dim=1)
    if torch.is_grad_enabled():
        results = [checkpoint(forward, tile, use_reentrant=False) for tile in tiles]
    else:
        results = [forward(tile) for tile in tiles]
    return torch.cat(results, dim=1).view_as(states)
