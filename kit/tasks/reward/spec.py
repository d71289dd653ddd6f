"""Reward models and pairwise rerankers: a sequence-classification head with one output, from preference pairs."""

from pydantic import BaseModel

from kit.tasks.spec import TaskMetric, TaskSpec, identity_option


class RewardSettings(BaseModel):
    """What only reward reads."""

    center_rewards_coefficient: float = identity_option(
        0.0,
        "reward: weight of the squared sum of a pair's rewards in the loss, which centres them at 0; TRL: 0.01",
        ge=0,
    )


# The rates are from OpenRLHF's script for Llama 3 8B; TRL's RewardConfig for adapters.
SPECS = {
    "reward": TaskSpec(
        "kit.tasks.reward.loss.RewardModelling",
        "ranking",
        tuple(RewardSettings.model_fields),
        learning_rates=(9e-6, 1e-4),
        sequences_per_sample=2,
        head="scores",
        scores=("reward",),
        metrics=(
            TaskMetric("accuracy", "accuracy", ".1%", "accuracy, %", is_followed=True),
            TaskMetric("margin", "margin", "z.4f", "reward margin", is_followed=True),
        ),
    )
}
