"""Quantised checkpoints that are dequantised when they are read: FP8, MXFP4, GPTQ, AWQ, compressed-tensors.

Promises: a weight is (value - zero point) times scale, computed in float32 and rounded once to the dtype in which it is
loaded, as if the files held that model. Only the files know of the quantisation: what is trained, saved and counted is
the plain model. What cannot be read so is refused by name. ``qlora`` keeps MXFP4, see ``kit.model.experts.mxfp4``.
"""

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import modeling_utils

from kit.model.pretrained.quantised.packed import AWQ, GPTQ
from kit.model.pretrained.quantised.scaled import COMPRESSED, FP8, KEPT_MXFP4, MXFP4
from kit.model.pretrained.quantised.values import Form, Parts, Quantisation

_FORMS = {"fp8": FP8, "mxfp4": MXFP4, "gptq": GPTQ, "awq": AWQ, "compressed-tensors": COMPRESSED}
_KEYS = "quantization_config", "compression_config"  # of a config; the second in early files of compressed-tensors
# Nothing that training computes is rounded to 8 bits or less.
_NOT_OF_WEIGHTS = tuple(
    "activation_scale input_scale input_zero_point input_global_scale output_scale k_scale v_scale".split()
)


def quantisation_of(config: Any) -> Any:
    """Return what the config says of the files' quantisation, a dict unless the config is damaged; None if nothing."""
    places = [(each, key) for each in (config, config.get_text_config()) for key in _KEYS]
    return next((found for each, key in places if (found := getattr(each, key, None))), None)


def is_read_plain(config: Any) -> bool:
    """Return whether a quantised checkpoint can be read as plain weights, as far as its config shows it."""
    quantisation = quantisation_of(config)
    try:
        return bool(_FORMS[quantisation["quant_method"]].is_read(quantisation, config))
    except Exception:  # the config may hold anything
        return False


def plain_config(config: Any) -> Any:
    """Return a copy of a config without the files' quantisation: that of the model which is trained and saved."""
    plain = copy.deepcopy(config)
    for each in (plain, plain.get_text_config()):
        for key in _KEYS:
            vars(each).pop(key, None)
    return plain


def in_mxfp4(config: Any) -> bool:
    """Return whether the files hold experts in MXFP4."""
    return is_read_plain(config) and quantisation_of(config)["quant_method"] == "mxfp4"


def describe_dequantised(config: Any, method: str) -> list[str]:
    """Say in one line what is done with a quantised base; empty if its files hold plain weights."""
    if not is_read_plain(config):
        return []
    if method == "qlora" and in_mxfp4(config):
        return ["note: the experts of the base checkpoint are MXFP4, and stay so"]
    how = f"quantised ({quantisation_of(config)['quant_method']})"
    return [f"note: the base checkpoint is {how}: it is dequantised and trained as a plain model"]


def class_that_dequantises(config: Any) -> str:
    """Return the class of transformers whose ``dequantize=True`` opens the same weights; empty: there is none."""
    how = quantisation_of(config) and quantisation_of(config)["quant_method"]
    classes = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config", "compressed-tensors": "CompressedTensorsConfig"}
    return classes.get(how, "")


@contextmanager
def dequantising(config: Any, method: str) -> Iterator[None]:
    """In the ``with`` block, transformers dequantises the weights of a checkpoint with this ``config``.

    Args:
        method: with ``qlora`` experts in MXFP4 are read as they are, see ``Mxfp4Experts``.

    Raises:
        ValueError: from transformers' ``from_pretrained``, before a weight is read: weights and scales do not fit.
    """
    quantisation = quantisation_of(config)
    form = KEPT_MXFP4 if method == "qlora" and in_mxfp4(config) else _FORMS[quantisation["quant_method"]]
    load = modeling_utils.convert_and_load_state_dict_in_model

    def load_plain(model: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return load(model, _plain(state_dict, form, quantisation), *args, **kwargs)

    modeling_utils.convert_and_load_state_dict_in_model = load_plain
    try:
        yield
    finally:
        modeling_utils.convert_and_load_state_dict_in_model = load


@dataclass
class _Weight:
    """A weight that is computed when transformers reads it, by ``[...]`` as from a file."""

    _one_at_a_time = threading.Lock()  # transformers reads in several threads: float32 forms would add up

    compute: Callable[[Parts], torch.Tensor]
    parts: dict[str, Any]

    def __getitem__(self, key: Any) -> torch.Tensor:
        with self._one_at_a_time:
            return self.compute({part: value[...] for part, value in self.parts.items()})[key]


def _plain(files: dict[str, Any], form: Form, quantisation: Quantisation) -> dict[str, Any]:
    compute = partial(form.weight, quantisation)
    weights: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in files.items():
        if key.endswith(_NOT_OF_WEIGHTS):
            continue
        match = form.names.fullmatch(key)
        stem, part = match.groups() if match else (key, "")
        weights[stem][part] = value
    plain: dict[str, Any] = {}
    fitting = set()  # shapes and dtypes of parts: there may be thousands of experts with the same
    for stem, parts in weights.items():
        # The shape of what was packed is one of the parts.
        on_meta = {part: value[...] if part == "shape" else _on_meta(value) for part, value in parts.items()}
        if on_meta.keys() == {""} and on_meta[""].element_size() > 1:
            plain[stem] = parts[""]
            continue
        shapes = str(on_meta)
        if shapes not in fitting:
            try:
                with torch.device("meta"):
                    compute(on_meta)
            except Exception:  # the files may hold anything
                raise ValueError(
                    f"{stem} ({', '.join(parts)}) does not fit its quantisation; give the model that it was made from"
                ) from None
            fitting.add(shapes)
        plain[stem + form.ending] = _Weight(compute, parts)
    return plain


def _on_meta(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    dtype = modeling_utils.str_to_torch_dtype.get(value.get_dtype(), torch.uint8)  # others have 8 bits or less
    return torch.empty(value.get_shape(), dtype=dtype, device="meta")
