"""The metrics of a rollout, and the samples that a report shows."""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import LogitsProcessorList

from kit.data.feed.batches import Collator
from kit.data.samples.samples import Samples
from kit.model.sampling import Sampling, warpers
from kit.rollouts.generation import reference_of, text_of
from kit.rollouts.sampler import sampling_of
from kit.rollouts.trajectories import Trajectories, Trajectory, few_of

if TYPE_CHECKING:
    from kit.config.settings.objective import ObjectiveSettings
    from kit.strategy.accelerator import Prepared

NUM_SHOWN = 3  # prompts of a rollout


def lengths(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics of the completions' lengths, and the means of ``counts``; empty without completions."""
    trajectories = [each for each in trajectories if each.outcome != "failed"]
    if not trajectories:
        return {}
    found: dict[str, list[float]] = {
        "completions/mean_length": [each.num_written for each in trajectories],
        "completions/clipped_ratio": [not each.ended for each in trajectories],
    }
    found |= {name: [each.counts[name] for each in trajectories] for name in trajectories[0].counts}
    return {name: float(np.mean(values)) for name, values in found.items()}


def measured(
    groups: Sequence[Sequence[Trajectory]], keys: Sequence[str], num_without_variance: int
) -> dict[str, float]:
    """Return the metrics of all groups that were sampled for a rollout. A group has the trajectories of one prompt.

    Args:
        keys: the names of their rewards.
        num_without_variance: groups with zero reward variance.
    """
    trajectories = list(chain.from_iterable(groups))
    rewards = np.array([[each.reward for each in group] for group in groups])
    spreads = np.nanstd(rewards[np.isfinite(rewards).any(axis=1)], axis=1)
    metrics = {
        "reward": float(np.nanmean(rewards)),
        "reward_std": float(np.mean(spreads)),
        "frac_reward_zero_std": num_without_variance / len(groups),
    }
    return metrics | lengths(trajectories) | by_reward(trajectories, keys)


def by_reward(trajectories: Sequence[Trajectory], keys: Sequence[str]) -> dict[str, float]:
    """Return the mean of each reward if there are several, and how often one failed."""
    metrics: dict[str, float] = {}
    for k, key in enumerate(keys):
        values = [each.rewards[k] for each in trajectories]
        numbers = [value for value in values if isinstance(value, float)]
        if numbers and len(keys) > 1:
            metrics[f"rewards/{key}"] = float(np.mean(numbers))
        if len(numbers) < len(values):
            metrics[f"rewards/{key}/failed"] = len(values) - len(numbers)
    return metrics


def cut_probability(
    prepared: "Prepared",
    collator: Collator,
    trajectories: Sequence[Trajectory],
    prompts: Samples,
    settings: "ObjectiveSettings",
) -> float:
    """Return the probability of the tokens that could not be sampled. Called by all ranks.

    The mean over the tokens of some trajectories, by the policy at ``rollout_temperature``.
    """
    sampling = sampling_of(settings)
    temper, cut = (
        LogitsProcessorList(warpers(each))
        for each in (Sampling(sampling.temperature), sampling._replace(temperature=1.0))
    )

    ids: Any = None  # which they do not read

    def values(micro_batch: Any, logits: torch.Tensor, rows: Any) -> torch.Tensor:
        tempered = temper(ids, logits)
        return (tempered.softmax(dim=-1) * cut(ids, tempered).isneginf()).sum(dim=-1)

    found = Trajectories(few_of(trajectories), prompts).compute(prepared, collator, values)
    return float(np.mean(list(chain.from_iterable(found.values()))))


def conversation(trajectory: Trajectory, tokenizer: Any) -> str:
    """Return the text after the prompt. Each turn of the model, and what follows it, begins a line."""
    *before, last = [each.ids for each in trajectory.segments[1:]] or [[]]
    texts = [*map(tokenizer.decode, before), text_of(tokenizer, last, trajectory.outcome != "max_new_tokens")]
    return "\n".join(text.strip("\n") for text in texts) if before else texts[0]


def shown(trajectories: Sequence[Trajectory], prompts: Samples, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the rollout samples of the log and the report: the best and the worst completion of the first prompts."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.sample, []).append(trajectory)
    found = []
    for sample, group in list(groups.items())[:NUM_SHOWN]:
        ranked = sorted(group, key=lambda each: each.reward)
        for each in (ranked[-1], ranked[0]):
            found.append(
                {
                    "prompt": prompts.shown(tokenizer.decode(each.segments[0].ids)),
                    "reference": reference_of(tokenizer, prompts, sample),
                    "text": conversation(each, tokenizer),
                    "reward": each.reward,
                }
            )
    return found
