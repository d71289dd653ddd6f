"""Measure the drift from the trained model (base and adapter) to the merged model.

They differ by rounding, and for ``qlora`` because the merged model has no 4-bit error. Both compute the logits of the
same few sequences, and only one of them is in memory at a time.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kit.config.recipe import Recipe
from kit.config.settings.method import MethodSettings
from kit.data.open import open_data
from kit.data.samples.dataset import open_datasets
from kit.errors import UserError, raise_if
from kit.model.load import build_meta_model, build_model, check_model, open_config
from kit.model.plan import LoadPlan
from kit.model.token_rows import num_rows
from kit.model.tokenizer import open_tokenizer
from kit.run.record import read_run
from kit.visible import joined

# All logits of a model are kept in memory: at most 8 x 128 x vocabulary x 4 bytes.
NUM_SEQUENCES = 8
MAX_TOKENS = 128


@dataclass(frozen=True)
class Trained:
    """The logits of the trained model, before the merge."""

    logits: torch.Tensor  # float32 [N, V], after each of the N tokens of ``sequences``
    sequences: Sequence[torch.Tensor]  # int64 [T] each
    source: str  # where the sequences come from, for the message
    title: str  # what the model was, for the message


@dataclass(frozen=True)
class Drift:
    """The difference between two models."""

    mean_kl: float  # KL(trained || merged) of the next token in nats, the mean over all positions
    max_difference: float  # the largest absolute difference of a logit
    num_positions: int


def measure_trained(settings: MethodSettings, run_file: Path, read: Callable[[Any], Any] | None) -> Trained:
    """Build the model as it was trained, on the CPU, and compute its logits.

    Frozen weights have the precision of the run, are 4-bit for ``qlora``, and rounded as ``qat`` says.

    Args:
        settings: open the base with its adapter.
        run_file: ``run.json`` of the run.
        read: reads a checkpoint into the adapter; None if ``settings`` open the trained adapter itself.

    Raises:
        UserError: ``run_file`` cannot be read, or base or adapter cannot be opened or do not fit each other.
    """
    run, strategy = read_run(run_file)
    sequences, source = find_sequences(settings, run)
    as_trained = {"method": "qlora" if run.method == "qlora" else "lora"}
    as_trained |= {name: getattr(run, name) for name in ("qat", "qat_group_size")}
    settings = settings.model_copy(update=as_trained)
    config = open_config(settings)
    raise_if(check_model(settings, config, build_meta_model(settings, config)))
    compute: Any = "bfloat16" if strategy.mixed_precision == "bf16" else "float32"
    model = build_model(settings, config, LoadPlan(compute_dtype=compute, device="cpu"))
    if read:
        read(model)
    base = "4-bit base" if run.method == "qlora" else f"base rounded to {run.qat}" if run.qat else "base"
    title = f"adapter on the {base}, computed in {compute}"
    with torch.autocast("cpu", torch.bfloat16, enabled=compute == "bfloat16"):  # as in training
        logits = logits_of(model, sequences)
    del model
    gc.collect()  # the loss head refers to the model and back, so only the garbage collector frees it
    return Trained(logits, sequences, source, title)


def find_sequences(settings: MethodSettings, run: Recipe) -> tuple[list[torch.Tensor], str]:
    """Return sequences to compare the models on, and a string that says where they come from.

    They are the first evaluation samples of ``run``; if it has none that can be opened, random ids from a fixed seed.
    """
    vocab_size = num_rows(build_meta_model(settings, open_config(settings)))
    if run.has_evaluation:
        with suppress(UserError):  # the data was moved, or is on another machine
            samples = open_data(
                run,
                open_datasets(run.dataset_entries, run.eval_dataset_entries, run.streaming, run.declared.rows),
                open_tokenizer(settings),
                vocab_size,
                eval_settings=run,
                seed=run.seed,
                global_batch_size=run.global_batch_size,
                wanted=run.declared.rows,
            ).evaluation
            assert samples is not None
            num = min(NUM_SEQUENCES, len(samples))
            ids = [torch.from_numpy(samples.sequences(i)[0][0][:MAX_TOKENS].astype(np.int64)) for i in range(num)]
            return ids, f"the run's first {num} evaluation samples, cut at {MAX_TOKENS} tokens"
    shape = NUM_SEQUENCES, min(MAX_TOKENS, run.max_length)
    ids = list(torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0)))
    return ids, f"{shape[0]} sequences of {shape[1]} random tokens, as the run's evaluation data is not at hand"


@torch.no_grad()
def logits_of(model: Any, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the logits after each of the N tokens of ``sequences``, float32 [N, V].

    They are computed in the model's own precision, without dropout.
    """
    model.eval()
    return torch.cat([model(input_ids=ids[None]).logits[0].float() for ids in sequences])


def drift_between(trained: torch.Tensor, merged: torch.Tensor) -> Drift:
    """Compute the drift between the logits of two models, each float32 [N, V]."""
    kl = 0.0
    for one, other in zip(trained.split(MAX_TOKENS), merged.split(MAX_TOKENS), strict=True):
        p, q = (values.double().log_softmax(-1) for values in (one, other))
        kl += (p.exp() * (p - q)).sum().item()
    return Drift(kl / len(trained), (trained - merged).abs().max().item(), len(trained))


def describe_drift(trained: Trained, merged: Any) -> str:
    """Compute the drift of the model ``merged``, and describe it and how it was measured, as text for the user."""
    drift = drift_between(trained.logits, logits_of(merged, trained.sequences))
    return joined(
        [
            f"drift from the trained model ({trained.title}) to the merged one (computed in {str(merged.dtype)[6:]}):",
            f"    KL(trained || merged) {drift.mean_kl:.6g} nats per token, the mean over {drift.num_positions} "
            f"positions; largest difference of a logit {drift.max_difference:.6g}",
            f"    measured on {trained.source}",
        ]
    )
