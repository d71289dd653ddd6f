"""Compile the layers before the first step, by a forward and a backward pass whose gradients are dropped.

Promises: the graphs of training come from settings alone, whichever batch comes first, so that a run that resumes has
the same ones. If the compiler fails, it does so here, with one line. All ranks leave the same layers uncompiled.
"""

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kit.data.feed.batches import MicroBatch
from kit.model.layers.compile import Compiler
from kit.strategy.gradients import accumulating, drop_gradients
from kit.system.console import begin_work, say

if TYPE_CHECKING:
    from kit.config.settings.data import DataSettings
    from kit.strategy.accelerator import Prepared

# Of the example, about. Beyond 4,096 tokens kernels sum in another way; still more would take memory that a run of
# short samples does not need.
_NUM_TOKENS = 4608


def compile_first(prepared: "Prepared", compiler: Compiler, settings: "DataSettings", num_rows: int) -> None:
    """Compile forward and backward pass of the layers for micro-batches of ``num_rows``. Called by all ranks.

    Raises:
        UserError: the compiler failed.
    """
    from accelerate.utils import gather_object

    say(f"compiling {compiler.what}: takes minutes the first time, then a part of that, with torch's cache")
    begin_work(f"compiling {compiler.what}")
    compiler.is_on = True
    began = time.perf_counter()
    accelerator, model = prepared.accelerator, prepared.model
    inputs = _example(settings.max_length, num_rows, settings.packing).to(accelerator.device).model_inputs()
    with accumulating(accelerator, model, is_last=False):
        accelerator.backward(model(**inputs).sum())
    drop_gradients(model)
    for name, why in gather_object(list(compiler.left_out.items())):
        compiler.leave_out(name, why)
    say(f"compiled in {time.perf_counter() - began:.1f} s, with the pass that needed it")


def _example(max_length: int, num_rows: int, packing: bool) -> MicroBatch:
    """A micro-batch of ``num_rows``. In packs, each row has two samples.

    Its length is odd: torch would take an even one that some width of the model has too for a constant.
    """
    length = min(max_length, max(512, _NUM_TOKENS // num_rows)) - 1 | 1
    input_ids = torch.zeros(num_rows, length, dtype=torch.int64)
    target = torch.zeros(2, dtype=torch.int64)  # torch would take a single one for a constant
    batch = MicroBatch(
        input_ids=input_ids, target_positions=target, targets=target, weights=torch.ones(2), dataset_ids=target
    )
    if not packing:
        return replace(batch, attention_mask=torch.ones_like(input_ids))
    longer = length - length // 3
    lengths = [longer, length - longer] * num_rows
    positions = torch.cat([torch.arange(each) for each in lengths])
    return replace(
        batch,
        position_ids=positions.view(num_rows, length),
        cu_seq_lens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        segment_lengths=tuple(lengths),
        token_mask=torch.ones_like(input_ids),
    )
