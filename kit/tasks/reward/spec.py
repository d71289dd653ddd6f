"""Reward models: a score of an answer, from pairs of a better and a worse one."""

from pydantic import BaseModel

from kit.tasks.spec import TaskMetric, TaskSpec, identity_option


class RewardSettings(BaseModel):
    """What only reward reads."""

    center_rewards_coefficient: float = identity_option(
        0.0, "of reward: this times the square of the sum of both rewards is added to a pair's loss; TRL: 0.01", ge=0
    )


# The rates are from OpenRLHF's script for Llama 3 8B; TRL's RewardConfig for adapters.
SPECS = {
    "reward": TaskSpec(
        "kit.tasks.reward.loss.RewardModelling",
        "compared",
        tuple(RewardSettings.model_fields),
        learning_rates=(9e-6, 1e-4),
        sequences_per_sample=2,
        head="scores",
        scores=("reward",),
        metrics=(
            TaskMetric("accuracy", "accuracy", ".1%", "accuracy of the scores, %", is_followed=True),
            TaskMetric("margin", "margin", "z.4f", "difference of the scores of a pair", is_followed=True),
        ),
    )
}
