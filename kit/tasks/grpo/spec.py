"""GRPO and its family: policy gradients on sampled completions with rewards."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from kit.schema.fields import SERVER, comma_separated
from kit.schema.rules import Rule
from kit.scoring.own_metric import OwnMetric
from kit.tasks.spec import KL, TaskMetric, TaskSpec, identity_option, objective_option

RewardName = Annotated[
    str,
    Field(
        pattern=r"^(exact_match|number|token_f1|chrf|rouge_l|math|json|environment|regex:[\s\S]+|overlong:[1-9]\d*)$"
    ),
]
MOST_SAVED_TOKENS = 1_000_000  # of a rollout in a checkpoint


def _of_one_file(value: Any) -> Any:
    """Split ``FILE.py:name,other`` into ``FILE.py:name`` and ``FILE.py:other``."""
    names = comma_separated(value)
    for k, name in enumerate(names if isinstance(value, str) else ()):
        if k and ":" not in name:
            names[k] = f"{names[k - 1].rpartition(':')[0]}:{name}"
    return names


class GrpoSettings(BaseModel):
    """What only grpo reads."""

    rewards: Annotated[list[RewardName | OwnMetric], BeforeValidator(comma_separated)] = identity_option(
        [],
        "grpo: reward functions, separated by commas; as a flag also your own function(expected, answer, row)",
        expected="names of exact_match, number, token_f1, chrf, rouge_l, math, json, regex:PATTERN, overlong:N, "
        "environment, and FILE.py:FUNCTION",
    )
    reward_weights: Annotated[list[float] | None, BeforeValidator(comma_separated)] = identity_option(
        None, "grpo: weight of each reward in their sum; default: 1"
    )
    reward_timeout: float = objective_option(
        10.0, "grpo: timeout of one reward call; completions whose reward times out are dropped", "seconds", gt=0
    )
    rollout_temperature: float = identity_option(
        1.0,
        "grpo: sampling temperature of rollouts; the logits of all log-probabilities are divided by it",
        ge=0.01,
        le=10,
    )
    rollout_top_p: float = identity_option(
        1.0, "grpo: sample from the likeliest tokens with this total probability", gt=0, le=1
    )
    rollout_top_k: int = identity_option(0, "grpo: sample from this many of the likeliest tokens; 0: all", ge=0)
    rollout_min_p: float = identity_option(
        0.0, "grpo: sample from tokens with this fraction of the likeliest one's probability", ge=0, le=1
    )
    tools: Annotated[list[OwnMetric], BeforeValidator(_of_one_file)] = identity_option(
        [],
        "grpo: functions that the model may call in several turns, FILE.py:name,other; flag only, because it is code",
        expected="FILE.py:FUNCTION, separated by commas",
    )
    environment: OwnMetric | None = identity_option(
        None,
        "grpo: class whose public methods are tools, an object for each trajectory; flag only, because it is code",
        expected="FILE.py:CLASS",
    )
    max_turns: int = identity_option(
        8, "grpo: turns of the model in a trajectory with tools", "turns", ge=1, needs="tools or environment"
    )
    tool_timeout: float = objective_option(
        10.0,
        "grpo: timeout of a tool call; the model reads that it failed",
        "seconds",
        gt=0,
        needs="tools or environment",
    )
    num_generations: int = identity_option(8, "grpo: completions per prompt (group size)", "completions", ge=2)
    scale_rewards: Literal["auto", "group", "batch", "none"] = identity_option(
        "auto",
        "grpo: divide advantages by the std of the group or the batch; auto: none with dr_grpo and rloo, else group",
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = identity_option(
        "sum_then_normalize", "grpo: normalize_then_sum (GDPO) gives each reward its own advantages and sums these"
    )
    num_iterations: int = identity_option(1, "grpo: optimiser steps on the same rollout", "steps", ge=1)
    policy_loss: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "sapo"] = identity_option(
        "dapo", "grpo: loss variant and its normalisation"
    )
    importance_sampling_level: Literal["token", "sequence"] | None = identity_option(
        None,
        "grpo: probability ratio of a token, or of a completion (GSPO); default: sequence with gspo, rloo, else token",
    )
    sapo_temperature_pos: float = identity_option(
        1.0, "grpo: SAPO's gate, for advantages above 0", gt=0, needs="policy_loss sapo"
    )
    sapo_temperature_neg: float = identity_option(
        1.05, "grpo: SAPO's gate, for other advantages", gt=0, needs="policy_loss sapo"
    )
    epsilon: float = identity_option(0.2, "grpo: clip range of the probability ratio", gt=0)
    epsilon_high: float | None = identity_option(None, "grpo: upper clip range; default: epsilon", gt=0)
    kl_estimator: Literal["k2", "k3"] = identity_option("k3", "grpo: estimator of the KL penalty, with beta")
    mask_truncated_completions: bool = identity_option(
        False, "grpo: no loss on completions that were truncated: at max_new_tokens, max_turns or max_length"
    )
    dynamic_sampling: bool = identity_option(
        False, "grpo: sample other prompts in place of groups with zero reward variance (DAPO)"
    )
    vllm_server_base_url: str | None = objective_option(
        None,
        "grpo: vLLM server that generates the rollouts, for example http://localhost:8000",
        **SERVER,
    )
    vllm_server_timeout: float = objective_option(
        240.0,
        "how long to wait for a vLLM server that does not answer",
        "seconds",
        gt=0,
        needs="vllm_server_base_url or teacher_server",
    )
    vllm_importance_sampling_cap: float | None = identity_option(
        None,
        "grpo: cap of the importance weights pi_train / pi_vllm, for example 2; default: no correction",
        gt=0,
        needs="vllm_server_base_url",
    )

    rollout_overlap: bool = identity_option(
        False,
        "grpo: a vLLM server generates the next rollout while a step trains, with the weights of before that step",
    )

    @property
    def has_tools(self) -> bool:
        """Whether completions have several turns, with tools."""
        return bool(self.tools or self.environment)

    @property
    def cuts_rollouts(self) -> bool:
        """Whether unlikely tokens cannot be sampled."""
        return self.rollout_top_p < 1 or self.rollout_top_k > 0 or self.rollout_min_p > 0

    @property
    def by_sequence(self) -> bool:
        """Whether the probability ratio is that of a completion, not of a token."""
        return self.policy_loss in ("gspo", "rloo") or self.importance_sampling_level == "sequence"

    @property
    def upper_epsilon(self) -> float:
        """``epsilon_high``, or its default."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


def _bad_pattern(settings: GrpoSettings) -> str:
    """The reward whose pattern is no regular expression, and why."""
    for name in settings.rewards:
        try:
            re.compile(name.removeprefix("regex:") if name.startswith("regex:") else "")
        except (re.error, OverflowError, RecursionError) as error:
            return f"{name}: {error}"
    return ""


RULES = (
    Rule(
        "rewards objective",
        lambda r: not r.rewards,
        "none given",
        "--rewards number; or FILE.py:FUNCTION; or environment, which is get_reward of --environment",
    ),
    Rule(
        "rewards environment",
        lambda r: "environment" in r.rewards and not r.environment,
        "environment, and none is given",
        "--environment FILE.py:CLASS",
    ),
    Rule("rewards", _bad_pattern, "{it}", "a pattern of Python's re; with a comma in it in a recipe, as a list"),
    Rule(
        "reward_weights rewards",
        lambda r: r.reward_weights is not None and len(r.reward_weights) != len(r.rewards),
        "{r.reward_weights}, for rewards {r.rewards}",
        "give one number for each of rewards",
    ),
    Rule(
        "global_batch_size num_generations",
        lambda r: r.global_batch_size % r.num_generations,
        "{r.global_batch_size} completions a step, in groups of num_generations {r.num_generations}",
        "make it a multiple of num_generations",
    ),
    Rule(
        "importance_sampling_level policy_loss",
        lambda r: (
            (r.importance_sampling_level == "sequence" and r.policy_loss in ("cispo", "sapo"))
            or (r.importance_sampling_level == "token" and r.by_sequence)
        ),
        "{r.importance_sampling_level} with policy_loss {r.policy_loss}, which has another ratio",
        "leave it out; or sequence with policy_loss grpo, dapo or dr_grpo",
    ),
    Rule(
        "rollout_temperature vllm_importance_sampling_cap rollout_overlap",
        lambda r: (r.vllm_importance_sampling_cap or r.rollout_overlap) and r.rollout_temperature != 1,
        "{r.rollout_temperature:g}, with a correction by a vLLM server's log-probabilities before the temperature",
        "leave it out; or vllm_importance_sampling_cap and rollout_overlap",
    ),
    Rule(
        "rollout_overlap vllm_server_base_url tools environment",
        lambda r: r.rollout_overlap and (not r.vllm_server_base_url or r.has_tools),
        "true, which needs a vLLM server, and completions of a single turn",
        "--vllm_server_base_url http://HOST:PORT, without tools; or --rollout_overlap false",
    ),
    Rule(
        "kl_estimator policy_loss",
        lambda r: r.kl_estimator != "k3" and r.policy_loss == "rloo",
        "{r.kl_estimator} with policy_loss rloo, which subtracts k1, the log-ratio, from rewards",
        "leave it out; or --policy_loss grpo",
    ),
    Rule(
        "scale_rewards policy_loss",
        lambda r: r.policy_loss == "rloo" and r.scale_rewards in ("group", "batch"),
        "{r.scale_rewards} with policy_loss rloo, whose advantages are not divided",
        "leave it out; or --policy_loss grpo",
    ),
    Rule(
        "multi_objective_aggregation policy_loss scale_rewards",
        lambda r: (
            r.multi_objective_aggregation == "normalize_then_sum"
            and (r.scale_rewards != "auto" or r.policy_loss == "rloo")
        ),
        "normalize_then_sum, which divides by the standard deviation of the group and of the batch, with policy_loss "
        "{r.policy_loss} and scale_rewards {r.scale_rewards}",
        "leave out scale_rewards; and another policy_loss than rloo",
    ),
    Rule(
        "num_iterations rollout_overlap global_batch_size max_length",
        lambda r: (
            (r.num_iterations > 1 or r.rollout_overlap) and r.global_batch_size * r.max_length > MOST_SAVED_TOKENS
        ),
        "{r.num_iterations}, rollout_overlap {r.rollout_overlap}, with {r.global_batch_size} rows of {r.max_length} "
        "tokens, which a checkpoint would hold",
        f"--num_iterations 1 without rollout_overlap; or fewer tokens in all than {MOST_SAVED_TOKENS:,}",
    ),
    Rule(
        "vllm_server_base_url adapter_type use_dora trainable_tokens new_tokens lora_modules_to_save",
        lambda r: (
            r.vllm_server_base_url
            and (r.adapter_type != "lora" or r.use_dora or r.trainable_tokens or r.new_tokens or r.lora_modules_to_save)
        ),
        "given with what vLLM does not serve: other adapters than plain LoRA, embedding rows, or modules_to_save",
        "plain LoRA; or leave it out, and the model generates the rollouts itself",
    ),
)

# The rates are from TRL's GRPOConfig, also for clipping and a beta of 0; for adapters ten times its rate.
SPECS = {
    "grpo": TaskSpec(
        "kit.tasks.grpo.loss.PolicyLoss",
        rows="prompts",
        settings=("beta", *GrpoSettings.model_fields),
        beta=0.0,
        learning_rates=(1e-6, 1e-5),
        rolls_out=True,
        logit_bytes=lambda r: 12 if r.rollout_temperature != 1 else 0,  # as with label smoothing
        metrics=(
            TaskMetric("reward", "reward"),
            TaskMetric("frac_reward_zero_std", digits=".1%", chart="groups with zero reward variance, %"),
            KL,
        ),
        rules=RULES,
    )
}
