"""Find tokens whose embedding looks untrained, from the weights on disk.

A base model may have tokens that occurred nowhere in its training, among them the one that ends an answer in a chat
template. The rows of such tokens in the output head stay where they started, or move together, since they all get
nearly the same gradient. Adapters change hidden states, not rows: if two tokens have the same row,
no hidden state makes one of them likelier than the other. A run that freezes the head learns everything but to stop.

Only the rows that are needed are read, a few megabytes of a head of gigabytes.
"""

import copy
import json
import os
import shlex
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from kit.config.settings.method import MethodSettings
from kit.config.settings.model import ModelSettings
from kit.model.adapters.adapter import attach_adapter
from kit.model.adapters.serving import merge_command
from kit.system.durable import read_small
from kit.system.errors import Problem

# Rows of other tokens to compare with: blocks spread evenly over the vocabulary.
NUM_BLOCKS = 8
BLOCK_ROWS = 256
NUM_SPECIAL = 512  # rows of special tokens and of padding to compare with, at most
# Bounds of ``is_untrained``, far from what trained and untrained rows measure.
# The second nearest special row of the unused roles in the embedded tiny model is at 0.27 to 0.37, that of its trained
# tokens at 1.5 and above, those of the unused tokens in a published model of 260k parameters at 0.005.
CLOSE = 0.5
AT_MEAN = 0.1  # 0 after a resize, trained rows 0.5 and above
ZERO = 0.01


def check_stop_tokens(
    settings: MethodSettings, meta_model: Any, tokenizer: Any, stop_ids: Iterable[int], final: str = "final"
) -> list[Problem]:
    """Return a problem for each stop token of the data that this run cannot learn to generate.

    That is: its output row was never trained (``is_untrained``), and ``settings`` freeze it. It is a problem and not a
    warning, because such a run is wasted and the fix costs one row: ``trainable_tokens``. If the row was trained after
    all, the same flag starts the run, and does no harm.

    Args:
        meta_model: the model on meta; it is not changed.
        stop_ids: the tokens that end answers.
        final: where the run will write its adapter, for the message.
    """
    ids = sorted(stop_ids)
    if settings.method == "full" or not ids:
        return []
    head = _open_head(settings, meta_model)
    if head is None:
        return []
    num_rows, hidden_size = head.get_shape()
    special = [i for i in tokenizer.added_tokens_decoder if i < num_rows]
    special += range(max(tokenizer.get_vocab().values()) + 1, num_rows)  # padding
    starts = [block * max(num_rows - BLOCK_ROWS, 0) // (NUM_BLOCKS - 1) for block in range(NUM_BLOCKS)]
    sample = sorted({i for start in starts for i in range(start, min(start + BLOCK_ROWS, num_rows))})

    def rows(numbers: Iterable[int], without: int) -> torch.Tensor:
        found = [head[i : i + 1] for i in numbers if i != without]
        return torch.cat(found).float() if found else torch.empty(0, hidden_size)

    unlearnable = [
        i
        for i in ids
        if i < num_rows
        and is_untrained(head[i : i + 1][0].float(), rows(special[:NUM_SPECIAL], i), rows(sample, i))
        and not _trains_row(settings, meta_model, i)
    ]
    if not unlearnable:
        return []
    tokens = ",".join(tokenizer.convert_ids_to_tokens(unlearnable))
    found = f"{tokens} ends the answers, but its lm_head row looks untrained, and {settings.method} freezes it"
    kind = "" if settings.adapter_type == "lora" else "--adapter_type lora "
    fix = f"{kind}--trainable_tokens {shlex.quote(tokens)} trains that row too; or --method full."
    fix += f" vLLM and llama.cpp need such adapters merged: {merge_command(final)}"
    return [Problem("trainable_tokens", found, "a run that can learn to stop", fix)]


def is_untrained(row: torch.Tensor, special: torch.Tensor, sample: torch.Tensor) -> bool:
    """Return whether a row of an output head clearly never had a gradient of its own.

    Four cases, each of which a trained row misses by far, in any number of dimensions:

    - It is zero: its norm is below ``ZERO`` of the median norm.
    - It is the mean: its distance to the mean row is below ``AT_MEAN`` of the median distance, as after a resize.
    - It equals another row, but for rounding.
    - It moved with other unused ones: two rows of special tokens or padding are closer to it than ``CLOSE`` of the
      median distance from a row to the next one. Two, because a trained token may have a twin in meaning.

    Args:
        row: float32 [h], the row in question.
        special: float32 [N, h], rows of other special tokens, and of padding.
        sample: float32 [M, h], rows of other tokens of any kind.
    """
    norms = sample.norm(dim=1)
    mean = sample.mean(dim=0)
    if row.norm() < ZERO * norms.median():
        return True
    if (row - mean).norm() < AT_MEAN * (sample - mean).norm(dim=1).median():
        return True
    rounding = 1e-3 * norms.median()
    if (torch.cat([sample, special]) - row).norm(dim=1).min() < rounding:
        return True
    some = sample[:: max(1, len(sample) // BLOCK_ROWS)]
    nearest = torch.cdist(some, sample).kthvalue(min(2, len(sample)), dim=1).values  # the first is the row itself
    usual = nearest[nearest > rounding].median()  # NaN if all are equal, which compares as false
    num_close = ((special - row).norm(dim=1) < CLOSE * usual).sum()
    return bool(num_close >= 2)


def _trains_row(settings: MethodSettings, meta_model: Any, token_id: int) -> bool:
    """Whether the output row of a token trains: by an adapter, as a single row or with the whole head."""
    adapted: Any = attach_adapter(copy.deepcopy(meta_model), settings)
    head = adapted.get_base_model().get_output_embeddings()
    if hasattr(head, "token_adapter"):
        return token_id in head.token_adapter.token_indices["default"]
    return any(parameter.requires_grad for parameter in head.parameters())


def _open_head(settings: ModelSettings, meta_model: Any) -> Any:
    """The output head in its file, of which rows are read by slices; None without the file, or under other names."""
    weight = meta_model.get_output_embeddings().weight
    names = [name for name, p in meta_model.named_parameters(remove_duplicate=False) if p is weight]
    for name in reversed(names):  # a head of its own, if the files have one
        # What is damaged, loading reports.
        with suppress(OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError):
            file = "model.safetensors"
            if not _path_of(settings, file):
                index = _path_of(settings, "model.safetensors.index.json")
                file = json.loads(read_small(index))["weight_map"][name]
            return safe_open(_path_of(settings, file), "pt").__enter__().get_slice(name)
    return None


def _path_of(settings: ModelSettings, file: str) -> Any:
    """The path of a file of the model, in its folder or the hub's cache; None if it is not on this machine."""
    return cached_file(
        os.path.expanduser(settings.model_name_or_path),
        file,
        revision=settings.model_revision,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
