"""Settings of the objective: common ones, and those of each task."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel

from kit.schema.fields import STRICT, is_identity
from kit.schema.rules import Rule, is_given
from kit.tasks.classify import spec as classify
from kit.tasks.distil import spec as distil
from kit.tasks.embed import spec as embed
from kit.tasks.grpo import spec as grpo
from kit.tasks.kto import spec as kto
from kit.tasks.preference import spec as preference
from kit.tasks.reward import spec as reward
from kit.tasks.sft import spec as sft
from kit.tasks.spec import TaskSpec, identity_option, objective_option

TASKS = (sft, distil, preference, kto, reward, classify, embed, grpo)
DECLARED: Mapping[str, TaskSpec] = {name: spec for task in TASKS for name, spec in task.SPECS.items()}
PLAIN = next(iter(DECLARED))  # the default

if TYPE_CHECKING:
    ObjectiveName = str
else:
    ObjectiveName = Literal[tuple(DECLARED)]


class _Named(BaseModel):
    """The objective's name, and a setting of several."""

    objective: ObjectiveName = identity_option(
        PLAIN,
        "SFT: sft dft eaft; distillation: distil; preferences: dpo orpo simpo cpo kto; RL: grpo; reward classify embed",
    )
    beta: float | None = identity_option(
        None,
        "preferences: reward scale; grpo: KL penalty coefficient; distil: interpolation of jsd; default: by objective",
        gt=0,
    )


# pydantic takes the fields of the last base first.
class ObjectiveSettings(
    grpo.GrpoSettings,
    embed.EmbedSettings,
    classify.ClassifySettings,
    reward.RewardSettings,
    distil.DistilSettings,
    kto.KtoSettings,
    preference.CpoSettings,
    preference.SimpoSettings,
    sft.SftSettings,
    preference.DpoSettings,
    _Named,
):
    """The objective of a run."""

    model_config = STRICT

    precompute_reference: bool = objective_option(
        False,
        "dpo, kto: run the reference model before the first step; always so with full or adapter_name_or_path",
    )

    @property
    def declared(self) -> TaskSpec:
        """What the objective's name implies."""
        return DECLARED[self.objective]

    @property
    def rolls_out(self) -> bool:
        """Whether the model trains on completions that it generates."""
        return self.declared.rolls_out or self.on_policy_share > 0

    @property
    def answers_per_prompt(self) -> int:
        """Completions per prompt; 1 without a group: ``global_batch_size`` counts the completions of rollouts."""
        return self.num_generations if self.declared.rolls_out else 1

    @property
    def logit_bytes(self) -> int:
        """See ``TaskSpec.logit_bytes``."""
        return self.declared.logit_bytes(self)

    @property
    def scores(self) -> list[str]:
        """The names of the outputs of a sequence-classification head."""
        return [*self.declared.scores] or self.labels or []

    @property
    def reward_scale(self) -> float:
        """``beta``, or its default for the objective."""
        return self.beta or self.declared.beta or 0.0

    @property
    def objective_settings(self) -> dict[str, float | str]:
        """The settings of the loss, ``beta`` with its default."""
        names = [name for name in self.declared.settings if is_identity(type(self).model_fields[name])]
        return {name: self.reward_scale if name == "beta" else getattr(self, name) for name in names}


def takers(name: str) -> list[str]:
    """Return the objectives that read a setting."""
    return [objective for objective, declared in DECLARED.items() if name in declared.settings]


RULES = (
    *(
        Rule(
            f"{name} objective",
            partial(lambda name, r: is_given(r, name) and r.objective not in takers(name), name),
            "objective {r.objective} does not read it",
            f"leave it out{'' if name in ('tools', 'environment') else ', or put it under by_objective in a recipe'}; "
            f"or --objective {' or '.join(takers(name))}",
        )
        for name in ObjectiveSettings.model_fields
        if takers(name)
    ),
    *(
        Rule(
            f"{name} objective",
            partial(lambda name, r: r.declared.head != "lm" and is_given(r, name), name),
            "given with objective {r.objective}, " + why,
            "leave it out",
        )
        for name, why in (
            ("streaming", "whose data are read before the first step"),
            ("predict_with_generate", "whose model does not generate"),
            ("new_tokens", "which cannot train single rows of the embedding"),
            ("trainable_tokens", "which cannot train single rows of the embedding"),
            ("qat", "not tested together, so refused"),
            ("fp8", "not tested together, so refused"),
            ("router_aux_loss_coef", "which has no load-balancing loss, as in transformers"),
            ("system_prompt", "which adds no system message"),
        )
    ),
    Rule(
        "save_only_model objective",
        lambda r: r.rolls_out and r.save_only_model,
        "true with objective {r.objective}: a run that is stopped in a rollout continues from its last checkpoint",
        "--save_only_model false",
    ),
    Rule(
        "max_length max_new_tokens objective",
        lambda r: r.rolls_out and r.max_new_tokens >= r.max_length,
        "{r.max_length} tokens for prompt and completion, with max_new_tokens {r.max_new_tokens}",
        "--max_length of the longest prompt and max_new_tokens together",
    ),
    Rule(
        "train_on objective",
        lambda r: r.rolls_out and r.train_on == "all",
        "all, with objective {r.objective}, which generates completions to prompts",
        "--train_on assistant",
    ),
    Rule(
        "streaming objective",
        lambda r: r.streaming and r.rolls_out,
        "with objective {r.objective}, whose prompts are read before the first step",
        "--streaming false",
    ),
    Rule(
        "train_on objective",
        lambda r: r.declared.rows != "answers" and not r.rolls_out and r.train_on == "all",
        "all, with objective {r.objective}, which compares or scores texts",
        "--train_on assistant",
    ),
    Rule(
        "excess_length_strategy objective",
        lambda r: r.declared.rows != "answers" and r.excess_length_strategy == "split",
        "split, with objective {r.objective}, whose samples must stay whole",
        "--excess_length_strategy truncate cuts the prompt; or --excess_length_strategy drop",
    ),
    Rule(
        "streaming objective method precompute_reference adapter_name_or_path",
        lambda r: r.streaming and not r.declared.has_mismatched and r.precomputes_reference,
        "with objective {r.objective}, whose reference model runs before the first step",
        "--streaming false; or new adapters without precompute_reference: the reference is the model without them",
    ),
)
