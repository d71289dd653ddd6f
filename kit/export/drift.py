"""How far a merged model answers from the one that was trained: rounding, and the error of a 4-bit base that is gone.

Both models say what comes next after each token of the same few sequences; one of them is in memory at a time.
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
from kit.data.open import open_data, open_sources
from kit.errors import UserError, raise_if
from kit.model.load import build_meta_model, build_model, check_model, open_config, open_tokenizer
from kit.model.plan import LoadPlan
from kit.run.record import read_run

# All logits of one model are kept: at most 8 x 128 x vocabulary x 4 bytes.
NUM_SEQUENCES = 8
MAX_TOKENS = 128


@dataclass(frozen=True)
class Trained:
    """What the model said as it was trained: ``logits`` float32 [N, V] after each token of ``sequences``, int64 [T]
    each; ``source`` and ``title`` say in words where these are from and what the model was."""

    logits: torch.Tensor
    sequences: Sequence[torch.Tensor]
    source: str
    title: str


@dataclass(frozen=True)
class Drift:
    """``mean_kl``: KL(trained || merged) of the next token in nats, the mean over ``num_positions``;
    ``max_difference``: the largest absolute difference between any two logits."""

    mean_kl: float
    max_difference: float
    num_positions: int


def ask_trained(recipe: Recipe, run_file: Path, read: Callable[[Any], Any] | None) -> Trained:
    """Build the model as it was trained, on the CPU, and ask it: frozen weights in the precision of the run, and in
    4-bit for ``qlora``.

    Args:
        recipe: opens the base with its adapter.
        run_file: ``run.json`` of the run.
        read: fills the adapter from a checkpoint; None where it is as ``recipe`` opens it.

    Raises:
        UserError: ``run_file`` is none, or base or adapter cannot be opened or do not fit each other.
    """
    run, strategy = read_run(run_file)
    sequences, source = find_sequences(recipe, run)
    recipe = recipe.model_copy(update={"method": "qlora" if run.method == "qlora" else "lora"})
    config = open_config(recipe)
    raise_if(check_model(recipe, config, build_meta_model(recipe, config)))
    compute: Any = "bfloat16" if strategy.mixed_precision == "bf16" else "float32"
    model = build_model(recipe, config, LoadPlan(compute_dtype=compute, device="cpu"))
    if read:
        read(model)
    title = f"adapter on the {'4-bit ' if run.method == 'qlora' else ''}base, computed in {compute}"
    answers = ask(model, sequences)
    del model
    gc.collect()  # its loss head is a cycle
    return Trained(answers, sequences, source, title)


def find_sequences(recipe: Recipe, run: Recipe) -> tuple[list[torch.Tensor], str]:
    """The first evaluation samples of ``run``, or seeded random ids where it has none that can be opened; and which."""
    vocab_size = open_config(recipe).get_text_config().vocab_size
    if run.has_evaluation:
        with suppress(UserError):  # moved, or on another machine
            samples = open_data(run, open_sources(run), open_tokenizer(recipe), vocab_size).evaluation
            assert samples is not None
            num = min(NUM_SEQUENCES, len(samples))
            ids = [torch.from_numpy(samples[i][0][:MAX_TOKENS].astype(np.int64)) for i in range(num)]
            return ids, f"the run's first {num} evaluation samples, cut at {MAX_TOKENS} tokens"
    shape = NUM_SEQUENCES, min(MAX_TOKENS, run.max_length)
    ids = list(torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0)))
    return ids, f"{shape[0]} sequences of {shape[1]} random tokens, as the run's evaluation data is not at hand"


@torch.no_grad()
def ask(model: Any, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    """The logits after each token, computed in the model's own precision: float32 [N, V], dropout off."""
    model.eval()
    return torch.cat([model(input_ids=ids[None]).logits[0].float() for ids in sequences])


def compare(trained: torch.Tensor, merged: torch.Tensor) -> Drift:
    """Of two models' logits, each float32 [N, V]."""
    kl = 0.0
    for one, other in zip(trained.split(MAX_TOKENS), merged.split(MAX_TOKENS), strict=True):
        p, q = (values.double().log_softmax(-1) for values in (one, other))
        kl += (p.exp() * (p - q)).sum().item()
    return Drift(kl / len(trained), (trained - merged).abs().max().item(), len(trained))


def describe(trained: Trained, merged: Any) -> str:
    """The drift of ``merged``, a plain model, in words: what the numbers are, and how they were measured."""
    drift = compare(trained.logits, ask(merged, trained.sequences))
    return (
        f"drift from the trained model ({trained.title}) to the merged one (computed in {str(merged.dtype)[6:]}):\n"
        f"    KL(trained || merged) {drift.mean_kl:.6g} nats per token, the mean over {drift.num_positions} positions;"
        f" largest difference of a logit {drift.max_difference:.6g}\n"
        f"    measured on {trained.source}"
    )
