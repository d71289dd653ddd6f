"""GRPO and its family: the model's own answers, with rewards."""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from kit.schema.fields import comma_separated
from kit.schema.rules import Rule
from kit.scoring.own_metric import OwnMetric
from kit.tasks.spec import KL, TaskMetric, TaskSpec, identity_option, objective_option

RewardName = Annotated[
    str,
    Field(pattern=r"^(exact_match|number|token_f1|chrf|rouge_l|math|json|regex:[\s\S]+|overlong:[1-9]\d*)$"),
]
MOST_SAVED_TOKENS = 1_000_000  # of a rollout in a checkpoint


class GrpoSettings(BaseModel):
    """What only grpo reads."""

    rewards: Annotated[list[RewardName | OwnMetric], BeforeValidator(comma_separated)] = identity_option(
        [],
        "of grpo: what answers are worth, separated by commas; as a flag also your own function(expected, answer, row)",
        expected="names of exact_match, number, token_f1, chrf, rouge_l, math, json, regex:PATTERN, overlong:N, and "
        "FILE.py:FUNCTION,",
    )
    reward_weights: Annotated[list[float] | None, BeforeValidator(comma_separated)] = identity_option(
        None, "of grpo: the weight of each of rewards in their sum; default: 1"
    )
    reward_timeout: float = objective_option(
        10.0, "of grpo: for one reward of an answer, which is left out without it", "seconds", gt=0
    )
    num_generations: int = identity_option(8, "of grpo: answers to each prompt, which are compared", "answers", ge=2)
    num_iterations: int = identity_option(1, "of grpo: steps that learn from the same answers", "steps", ge=1)
    policy_loss: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo"] = identity_option(
        "dapo", "of grpo: the loss of a token or an answer, and what its sum is divided by"
    )
    epsilon: float = identity_option(0.2, "of grpo: how far a probability may fall or rise in num_iterations", gt=0)
    epsilon_high: float | None = identity_option(None, "of grpo: how far it may rise; default: epsilon", gt=0)
    kl_estimator: Literal["k2", "k3"] = identity_option("k3", "of grpo with beta: of the distance to the reference")
    mask_truncated_completions: bool = identity_option(
        False, "of grpo: learn nothing from answers that max_new_tokens cut off"
    )
    dynamic_sampling: bool = identity_option(
        False, "of grpo: take other prompts in place of those whose answers all have the same reward"
    )
    vllm_server_base_url: str | None = objective_option(
        None,
        "of grpo: a vLLM server that writes the answers in place of the model, such as http://localhost:8000",
        expected="http://HOST:PORT",
        pattern=r"^https?://[^\s/@?#]+/?$",
    )
    vllm_server_timeout: float = objective_option(
        240.0, "how long to wait for a server that does not answer", "seconds", gt=0, needs="vllm_server_base_url"
    )
    vllm_importance_sampling_cap: float | None = identity_option(
        None,
        "each token's loss times its probability here / at the server, at most this, such as 2; default: not",
        gt=0,
        needs="vllm_server_base_url",
    )

    @property
    def upper_epsilon(self) -> float:
        """``epsilon_high``, or its default."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


def _bad_pattern(settings: GrpoSettings) -> str:
    """The reward whose pattern is none, with what is wrong with it."""
    for name in settings.rewards:
        try:
            re.compile(name.removeprefix("regex:") if name.startswith("regex:") else "")
        except (re.error, OverflowError, RecursionError) as error:
            return f"{name}: {error}"
    return ""


RULES = (
    Rule("rewards objective", lambda r: not r.rewards, "none given", "--rewards number"),
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
        "{r.global_batch_size} answers a step, in groups of num_generations {r.num_generations}",
        "make it a multiple of num_generations",
    ),
    Rule(
        "beta policy_loss",
        lambda r: r.beta and r.policy_loss == "rloo",
        "{r.beta:g} with policy_loss rloo, which takes the distance off the rewards, and this kit adds it to the loss",
        "leave it out; or --policy_loss grpo",
    ),
    Rule(
        "num_iterations global_batch_size max_length",
        lambda r: r.num_iterations > 1 and r.global_batch_size * r.max_length > MOST_SAVED_TOKENS,
        "{r.num_iterations}, with {r.global_batch_size} rows of {r.max_length} tokens, which a checkpoint would hold",
        f"--num_iterations 1; or fewer tokens in all than {MOST_SAVED_TOKENS:,}",
    ),
    Rule(
        "vllm_server_base_url method",
        lambda r: r.vllm_server_base_url and r.method == "full",
        "given with method full: the call by which vLLM 0.32 replaces all weights left some models wrong",
        "--method lora; or leave it out, and the model writes its answers itself",
    ),
    Rule(
        "vllm_server_base_url adapter_type use_dora trainable_tokens new_tokens lora_modules_to_save",
        lambda r: (
            r.vllm_server_base_url
            and (r.adapter_type != "lora" or r.use_dora or r.trainable_tokens or r.new_tokens or r.lora_modules_to_save)
        ),
        "given with what vLLM does not serve: adapters other than LoRA, DoRA, rows of tokens, or whole modules",
        "plain LoRA; or leave it out, and the model writes its answers itself",
    ),
)

# The rates are from TRL's GRPOConfig, also for clipping and a beta of 0; for adapters ten times its rate.
SPECS = {
    "grpo": TaskSpec(
        "kit.tasks.grpo.loss.PolicyLoss",
        settings=("beta", *GrpoSettings.model_fields),
        beta=0.0,
        learning_rates=(1e-6, 1e-5),
        rolls_out=True,
        metrics=(
            TaskMetric("reward", "reward"),
            TaskMetric("frac_reward_zero_std", digits=".1%", chart="prompts whose answers have one reward, %"),
            KL,
        ),
        rules=RULES,
    )
}
