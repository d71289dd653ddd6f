"""Prove on the prepared model, before the first step, that the loss head gives the losses of the model's own logits."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kit.model.pretrained.heads import head_of
from kit.strategy.float64 import in_float64
from kit.system.errors import UserError
from kit.train.checks.rows import Rows, evaluating

if TYPE_CHECKING:
    from kit.strategy.accelerator import Prepared

_TOKENS = 16
# Spread of the magnified losses in nats. Logits are a few times as large then, beyond the caps of all families (up to
# 50), so that a cap, a factor or a divisor that is missing or too many changes losses by more than their rounding.
_SPREAD = 100.0


def prove_head(prepared: "Prepared", vocab_size: int) -> list[str]:
    """Compare the losses of the loss head with those of the model's own logits, on a few tokens. Called by all ranks.

    They are compared as they are, and with hidden states magnified before the head. Where they differ by more than
    rounding, the model's own logits are used from then on. Weights, buffers and random state stay as they are.

    Args:
        vocab_size: rows of the model's embedding.

    Returns:
        A line to print if the model's own logits are used because of this, else none.
    """
    accelerator, model = prepared.accelerator, prepared.model
    plain: Any = accelerator.unwrap_model(model)
    base = plain.get_base_model() if hasattr(plain, "get_base_model") else plain
    head = head_of(base.config)
    size = prepared.ranks.num_parts  # of the sequence-parallel group

    def refused(why: str) -> UserError:
        return UserError("sequence_parallel_size", f"{size}, and {why}", "1 for this model")

    if base.uses_own_logits:
        if size > 1:
            raise refused(f"{type(base).__name__} computes its logits in a way of its own")
        return []
    if head == "embedding":
        return []
    ids = np.random.default_rng(0).integers(vocab_size, size=_TOKENS)
    weights = np.ones(_TOKENS)
    if head == "scores":  # of the last token
        weights[:-1], ids[-1] = 0, ((base.config.get_text_config().pad_token_id or 0) + 1) % vocab_size
    batch = Rows([(ids, weights)]).micro_batch([0])
    if head == "scores":
        batch = replace(batch, target_positions=batch.target_positions + 1)
    inputs = batch.to(accelerator.device).model_inputs()

    def losses(own: bool, magnified: float) -> torch.Tensor:
        base.uses_own_logits = own
        try:
            with _magnifying(base.get_output_embeddings(), magnified), _same_random_numbers(accelerator.device):
                return in_float64(model(**inputs))
        finally:
            base.uses_own_logits = False

    with evaluating(model), torch.no_grad():
        own = losses(own=True, magnified=1.0)
        difference = _difference(losses(own=False, magnified=1.0), own)
        if head == "scores":
            if difference > 1e-2:
                found = f"it does not classify by the last token: scores differ by {difference:.1%}"
                raise UserError("model_name_or_path", found, "a family like Llama, Qwen, Gemma or Mistral")
            return []
        magnified = _SPREAD / max(own.std().item(), 1e-4)
        magnified_difference = _difference(
            losses(own=False, magnified=magnified), losses(own=True, magnified=magnified)
        )
    # Rounding in bfloat16: 0.4 % of a logit for each operation of the transform.
    tolerance = 1e-4 if prepared.computes_in_float32 else 1e-2
    worst = max(difference, magnified_difference)
    differs = torch.tensor(float(worst > tolerance), device=accelerator.device)
    if not prepared.ranks.sum(differs).item():
        return []
    if size > 1:
        raise refused(f"its losses with sequence parallelism differ by {worst:.1%} from those without")
    base.uses_own_logits = True
    return [
        "note: the model computes its own logits, of all positions at once, which takes more memory: losses of the"
        f" kit's chunked loss head differ by {worst:.1%} on a test"
    ]


def _difference(losses: torch.Tensor, own: torch.Tensor) -> float:
    """The largest difference relative to the largest loss; not finite losses count as equal if both have them."""
    if not torch.equal(losses.isfinite(), own.isfinite()):
        return float("inf")
    shown = own.isfinite()
    if not shown.any():
        return 0.0
    return float((losses - own)[shown].abs().max() / own[shown].abs().max().clamp(min=1.0))


@contextmanager
def _magnifying(head: torch.nn.Module, factor: float) -> Iterator[None]:
    """In the ``with`` block, multiply the hidden states that reach the head by ``factor``."""
    handle = head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * factor, *inputs[1:]))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _same_random_numbers(device: torch.device) -> Iterator[None]:
    """In the ``with`` block, let each call of a random model draw the same numbers; afterwards nothing was drawn."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield
