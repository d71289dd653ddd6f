"""Check that a vLLM server has the weights of the policy: their log-probabilities agree."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from kit.data.feed.batches import Collator
from kit.data.samples.samples import Samples
from kit.model.adapters.adapter import adapters_off
from kit.rollouts.trajectories import Trajectories, Trajectory, few_of
from kit.rollouts.vllm_client import FIELD
from kit.system.errors import LateError

if TYPE_CHECKING:
    from kit.strategy.accelerator import Prepared

# The largest mean difference of their tokens, in nats. vLLM 0.32 differed by 4e-7 in float32, with the adapter of the
# step before by 0.03 (recipes/tiny). In bf16 both sides round: by up to 8e-3 there, and larger models by more.
MAX_MEAN, MAX_MEAN_ROUNDED = 1e-3, 0.05


def check_sampler(
    prepared: "Prepared", collator: Collator, trajectories: Sequence[Trajectory], prompts: Samples, published: str
) -> dict[str, float]:
    """Compare the server's log-probabilities of some trajectories with the policy's. Called by all ranks.

    Args:
        published: the name of the weights that the sampler was given.

    Returns:
        The metrics ``sampling/logp_difference/mean`` and ``max``, in nats.

    Raises:
        LateError: on all ranks, if they differ by more than rounding, or are those of the base without adapters.
    """
    some = few_of(trajectories)
    samples = Trajectories(some, prompts)

    def differences(of_model: AbstractContextManager[None]) -> np.ndarray:
        with of_model:
            known = samples.compute_logps(prepared, collator)
        return np.concatenate([np.abs(np.subtract(own, some[i].logps["engine_logps"])) for i, own in known.items()])

    own = differences(nullcontext())
    mean, most = float(own.mean()), float(own.max())
    is_rounded = prepared.accelerator.mixed_precision != "no" or any(
        p.dtype != torch.float32 for p in prepared.model.parameters()
    )
    max_mean, beside = MAX_MEAN_ROUNDED if is_rounded else MAX_MEAN, ""
    if hasattr(prepared.accelerator.unwrap_model(prepared.model), "peft_config"):
        of_base = float(differences(adapters_off(prepared.model)).mean())
        max_mean = min(max_mean, 2 * of_base)
        beside = f", and by {of_base:.2g} from those of the base without the adapter"
    if not mean <= max_mean:
        found = (
            f"after publishing {published}, the server's log-probabilities of {len(own)} tokens in {len(some)} "
            f"completions differ from the policy's by {mean:.2g} nats on average, {most:.2g} at most{beside}"
        )
        fix = "let the server serve this run's model_name_or_path, in its precision (--dtype); docs/grpo.md"
        raise LateError(FIELD, found, f"at most {max_mean:.2g} on average, from rounding alone", fix)
    return {"sampling/logp_difference/mean": mean, "sampling/logp_difference/max": most}
