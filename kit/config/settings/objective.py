"""Settings of the objective, and what each objective needs before torch is imported."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from kit.schema.fields import STRICT, comma_separated, is_identity, option
from kit.schema.rules import Rule, is_given
from kit.scoring.own_metric import PATTERN

OwnMetric = Annotated[str, Field(pattern=f"^{PATTERN}$")]  # code, so the command line only: kit/config/recipe_file.py
RewardName = Annotated[
    str,
    Field(pattern=r"^(exact_match|number|token_f1|chrf|rouge_l|math|json|regex:(?s:.+)|overlong:[1-9]\d*)$"),
]

_option = partial(option, "Objective")
_identity = partial(option, "Objective", identity=True)

# What a row of the data holds: a conversation whose answers are learned; two answers to one prompt, of which one is
# better; or an answer with a label that says whether it is good. For a head in the place of words: two texts of which
# one is better; a text with its labels; a text with one that belongs to it, and some that do not.
Rows = Literal["answers", "pairs", "rated", "compared", "labelled", "contrasts"]
# What a model computes: logits of the vocabulary; scores of a text, from its last token; or the text's embedding.
Head = Literal["words", "scores", "embedding"]


@dataclass(frozen=True)
class Declared:
    """What is known of an objective by its name alone.

    Attributes:
        rows: what the data must hold.
        settings: the settings of ``ObjectiveSettings`` that it reads; with any other objective they have no effect.
        beta: the default of ``beta``; None: it has none.
        has_reference: it compares the model with a reference, the model as it was at the start.
        rolls_out: it learns from answers that the model writes to the prompts of the data.
        learning_rates: the default peak rate for full training, and for adapters.
        head: what the model computes.
    """

    rows: Rows = "answers"
    settings: tuple[str, ...] = ()
    beta: float | None = None
    has_reference: bool = False
    learning_rates: tuple[float, float] = (2e-5, 2e-4)
    rolls_out: bool = False
    has_teacher: bool = False
    head: Head = "words"

    @property
    def sequences_per_sample(self) -> int:
        """2 if a sample is a pair: the prompt with each of its answers. Without the negatives of ``contrasts``."""
        return 2 if self.rows in ("pairs", "compared", "contrasts") else 1


# OBJECTIVES in kit/tasks/objectives.py has the class of each name. Where the defaults of those over preferences come
# from, in the order full, adapters, beta:
# - dpo: Zephyr 7B in alignment-handbook, its full and its QLoRA recipe, and Tulu 3 8B in open-instruct for full. Both
#   have a beta of their own; 0.1 is that of TRL and HALOs.
# - orpo: the script of its authors for Mistral-ORPO-beta (github.com/xfactlab/orpo), also for beta; Zephyr 141B QLoRA
#   in alignment-handbook.
# - simpo: its authors recommend 3e-7 to 1e-6 (github.com/princeton-nlp/SimPO), and their code has beta 2 and a margin
#   of a quarter of it. No rate for adapters is published: ten times the other, as with dpo.
# - cpo: TRL's CPOConfig; the LoRA script of its authors (github.com/fe1ixxu/ALMA), also for beta.
# - kto: TRL's script, and its documentation names 5e-7 to 5e-6 as the range; LLaMA-Factory's LoRA example, also for
#   beta.
# - distil: those of sft.
# - reward: OpenRLHF's script for Llama 3 8B; TRL's RewardConfig for adapters.
# - classify, embed: those of sft, and so those of the examples of transformers and sentence-transformers.
# - grpo: TRL's GRPOConfig, also for clipping and a beta of 0; for adapters ten times its rate.
DECLARED: Mapping[str, Declared] = {
    "sft": Declared(settings=("label_smoothing_factor", "z_loss_coef", "neftune_noise_alpha")),
    "dft": Declared(settings=("neftune_noise_alpha",)),
    "eaft": Declared(settings=("eaft_alpha", "neftune_noise_alpha")),
    "distil": Declared(
        settings=(
            "teacher",
            "teacher_revision",
            "teacher_in_4bit",
            "teacher_top_k",
            "divergence",
            "beta",
            "distil_temperature",
            "cross_entropy_weight",
            "on_policy_share",
        ),
        beta=0.5,
        has_teacher=True,
    ),
    "dpo": Declared("pairs", ("beta", "dpo_loss", "label_smoothing", "precompute_reference"), 0.1, True, (5e-7, 5e-6)),
    "orpo": Declared("pairs", ("beta",), 0.1, False, (5e-6, 5e-5)),
    "simpo": Declared("pairs", ("beta", "simpo_gamma"), 2.0, False, (5e-7, 5e-6)),
    "cpo": Declared("pairs", ("beta", "cpo_alpha"), 0.1, False, (1e-6, 1e-4)),
    "kto": Declared(
        "rated",
        ("beta", "desirable_weight", "undesirable_weight", "precompute_reference"),
        0.1,
        True,
        (5e-7, 5e-6),
    ),
    "reward": Declared("compared", ("center_rewards_coefficient",), learning_rates=(9e-6, 1e-4), head="scores"),
    "classify": Declared("labelled", ("labels", "problem_type"), head="scores"),
    "embed": Declared("contrasts", ("pooling", "embed_temperature", "matryoshka_dims"), head="embedding"),
    "grpo": Declared(
        settings=(
            *("rewards", "reward_weights", "reward_timeout", "num_generations", "num_iterations", "policy_loss"),
            *("epsilon", "epsilon_high", "beta", "kl_estimator", "mask_truncated_completions", "dynamic_sampling"),
            *("vllm_server_base_url", "vllm_server_timeout", "vllm_importance_sampling_cap"),
        ),
        beta=0.0,
        learning_rates=(1e-6, 1e-5),
        rolls_out=True,
    ),
}


if TYPE_CHECKING:
    ObjectiveName = str
else:
    ObjectiveName = Literal[tuple(DECLARED)]


class ObjectiveSettings(BaseModel):
    """What a step minimises."""

    model_config = STRICT

    objective: ObjectiveName = _identity(
        "sft",
        "words: sft, dft, eaft, distil; pairs: dpo, orpo, simpo, cpo; rated: kto; rollouts: grpo; heads: the others",
    )
    beta: float | None = _identity(
        None,
        "scale of rewards, in grpo of the distance to the reference, in distil the share of jsd; default: 0.1, grpo 0",
        gt=0,
    )
    dpo_loss: Literal["sigmoid", "ipo", "hinge", "robust", "sigmoid_norm"] = _identity(
        "sigmoid", "of dpo: the loss of a pair; sigmoid_norm is sigmoid with log-probabilities per token"
    )
    label_smoothing: float = _identity(
        0.0, "of dpo, not with ipo or hinge: the share of pairs that may be the wrong way round", ge=0, lt=0.5
    )
    label_smoothing_factor: float = _identity(
        0.0, "of sft: the share of each target's probability that is spread evenly over the vocabulary", ge=0, lt=1
    )
    z_loss_coef: float = _identity(
        0.0,
        "of sft: this times (log of the sum of exponentiated logits)^2 is added to each loss; PaLM: 1e-4",
        ge=0,
        le=1,
    )
    eaft_alpha: float = _identity(
        1.0, "of eaft: the weight of a token is its relative entropy to this power", gt=0, le=100
    )
    neftune_noise_alpha: float = _identity(
        0.0,
        "of sft, dft, eaft: noise on the input embeddings in training, up to this / sqrt(tokens * size)",
        ge=0,
        le=1000,
    )
    simpo_gamma: float = _identity(0.5, "of simpo: how much larger the better answer's reward should be", ge=0)
    cpo_alpha: float = _identity(1.0, "of cpo: the weight of the cross-entropy of the chosen answers", ge=0)
    desirable_weight: float = _identity(1.0, "of kto: the weight of answers with the label true", gt=0)
    undesirable_weight: float = _identity(1.0, "of kto: the weight of answers with the label false", gt=0)
    teacher: str | None = _identity(
        None,
        "of distil: local folder or hub id of the model whose probabilities are learned; it has the same tokenizer",
    )
    teacher_revision: str | None = _option(None, "of distil: branch, tag or commit of a teacher with a hub id")
    teacher_in_4bit: bool = _identity(False, "of distil: quantise the teacher to 4 bits (NF4)")
    teacher_top_k: int = _identity(
        0,
        "of distil: learn its k most probable tokens, which are stored before the student is loaded; 0: all, beside it",
        "tokens",
        ge=0,
    )
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = _identity(
        "forward_kl", "of distil: KL(teacher || student), KL(student || teacher), or with beta between both"
    )
    distil_temperature: float = _identity(
        1.0, "of distil: both models' logits are divided by it, and the divergence is multiplied by its square", gt=0
    )
    cross_entropy_weight: float = _identity(0.0, "of distil: the share of plain cross-entropy in the loss", ge=0, lt=1)
    on_policy_share: float = _identity(
        0.0,
        "of distil: the share of prompts that the student answers itself; the others keep the data's answer",
        ge=0,
        le=1,
    )
    center_rewards_coefficient: float = _identity(
        0.0, "of reward: this times the square of the sum of both rewards is added to a pair's loss; TRL: 0.01", ge=0
    )
    labels: Annotated[list[str] | None, BeforeValidator(comma_separated)] = _identity(
        None, "of classify: names of the labels, in order; default: the model's, or those of the training data"
    )
    problem_type: Literal["single_label_classification", "multi_label_classification"] | None = _identity(
        None, "of classify: one label for each text, or any number; default: several if the column holds lists"
    )
    pooling: Literal["last", "mean"] = _identity("last", "of embed: the state of the last token, or the mean of all")
    embed_temperature: float = _identity(0.05, "of embed: similarities are divided by it", gt=0)
    matryoshka_dims: Annotated[list[Annotated[int, Field(ge=1)]], BeforeValidator(comma_separated)] = _identity(
        [], "of embed: the loss is also that of the first N numbers of an embedding, for each N of these"
    )
    rewards: Annotated[list[RewardName | OwnMetric], BeforeValidator(comma_separated)] = _identity(
        [],
        "of grpo: what answers are worth, separated by commas; as a flag also your own function(expected, answer, row)",
        expected="names of exact_match, number, token_f1, chrf, rouge_l, math, json, regex:PATTERN, overlong:N, and "
        "FILE.py:FUNCTION,",
    )
    reward_weights: Annotated[list[float] | None, BeforeValidator(comma_separated)] = _identity(
        None, "of grpo: the weight of each of rewards in their sum; default: 1"
    )
    reward_timeout: float = _option(
        10.0, "of grpo: for one reward of an answer, which is left out without it", "seconds", gt=0
    )
    num_generations: int = _identity(8, "of grpo: answers to each prompt, which are compared", "answers", ge=2)
    num_iterations: int = _identity(1, "of grpo: steps that learn from the same answers", "steps", ge=1)
    policy_loss: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo"] = _identity(
        "dapo", "of grpo: the loss of a token or an answer, and what its sum is divided by"
    )
    epsilon: float = _identity(0.2, "of grpo: how far a probability may fall or rise in num_iterations", gt=0)
    epsilon_high: float | None = _identity(None, "of grpo: how far it may rise; default: epsilon", gt=0)
    kl_estimator: Literal["k2", "k3"] = _identity("k3", "of grpo with beta: of the distance to the reference")
    mask_truncated_completions: bool = _identity(
        False, "of grpo: learn nothing from answers that max_new_tokens cut off"
    )
    dynamic_sampling: bool = _identity(
        False, "of grpo: take other prompts in place of those whose answers all have the same reward"
    )
    vllm_server_base_url: str | None = _option(
        None,
        "of grpo: a vLLM server that writes the answers in place of the model, such as http://localhost:8000",
        expected="http://HOST:PORT",
        pattern=r"^https?://[^\s/@?#]+/?$",
    )
    vllm_server_timeout: float = _option(
        240.0, "how long to wait for a server that does not answer", "seconds", gt=0, needs="vllm_server_base_url"
    )
    vllm_importance_sampling_cap: float | None = _identity(
        None,
        "each token's loss times its probability here / at the server, at most this, such as 2; default: not",
        gt=0,
        needs="vllm_server_base_url",
    )
    precompute_reference: bool = _option(
        False,
        "of dpo and kto: compute the reference before the first step; full and adapter_name_or_path always do",
    )

    @property
    def declared(self) -> Declared:
        """What is known of the objective by its name."""
        return DECLARED[self.objective]

    @property
    def rolls_out(self) -> bool:
        """Whether the model learns from its own answers."""
        return self.declared.rolls_out or self.on_policy_share > 0

    @property
    def answers_per_prompt(self) -> int:
        """Of a step, in which ``global_batch_size`` counts the answers of rollouts; else 1."""
        return self.num_generations if self.declared.rolls_out else 1

    @property
    def logit_bytes(self) -> int:
        """Bytes that a logit takes where autograd differentiates a loss of its own; 0: plain cross-entropy.

        As tensors show them: in float32 its log-softmax and gradients, log Z's of z-loss, and those of a teacher.
        """
        if self.z_loss_coef:
            return 20
        if self.declared.has_teacher:
            return 25 if self.teacher_top_k else 48 if self.divergence == "jsd" else 30
        return 12 if self.label_smoothing_factor or self.objective == "eaft" else 0

    @property
    def reward_scale(self) -> float:
        """``beta``, or its default for the objective."""
        return self.beta or self.declared.beta or 0.0

    @property
    def upper_epsilon(self) -> float:
        """``epsilon_high``, or its default."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def objective_settings(self) -> dict[str, float | str]:
        """The settings that say what the objective minimises, ``beta`` with its default."""
        names = [name for name in self.declared.settings if is_identity(type(self).model_fields[name])]
        return {name: self.reward_scale if name == "beta" else getattr(self, name) for name in names}


MOST_SAVED_TOKENS = 1_000_000  # of a rollout in a checkpoint


def _takers(name: str) -> list[str]:
    return [objective for objective, declared in DECLARED.items() if name in declared.settings]


def _bad_pattern(settings: ObjectiveSettings) -> str:
    """The reward whose pattern is none, with what is wrong with it."""
    for name in settings.rewards:
        try:
            re.compile(name.removeprefix("regex:") if name.startswith("regex:") else "")
        except (re.error, OverflowError, RecursionError) as error:
            return f"{name}: {error}"
    return ""


RULES = (
    *(
        Rule(
            f"{name} objective",
            partial(lambda name, r: is_given(r, name) and r.objective not in _takers(name), name),
            "objective {r.objective} does not read it",
            f"leave it out, or put it under by_objective in a recipe; or --objective {' or '.join(_takers(name))}",
        )
        for name in ObjectiveSettings.model_fields
        if _takers(name)
    ),
    Rule(
        "label_smoothing dpo_loss objective",
        lambda r: r.objective == "dpo" and r.label_smoothing and r.dpo_loss in ("ipo", "hinge"),
        "given with dpo_loss {r.dpo_loss}",
        "--label_smoothing 0; or --dpo_loss sigmoid",
    ),
    Rule(
        "dpo_loss label_smoothing objective",
        lambda r: r.objective == "dpo" and r.dpo_loss == "robust" and not r.label_smoothing,
        "robust without label_smoothing",
        "--label_smoothing 0.1, the share of pairs that are the wrong way round; or --dpo_loss sigmoid",
    ),
    Rule("teacher objective", lambda r: r.declared.has_teacher and not r.teacher, "none given", "--teacher MODEL"),
    Rule(
        "beta divergence",
        lambda r: r.declared.has_teacher and r.beta and (r.divergence != "jsd" or r.beta >= 1),
        "{r.beta:g} with divergence {r.divergence}",
        "--divergence jsd with beta between 0 and 1; or leave it out",
    ),
    Rule(
        "teacher_top_k on_policy_share",
        lambda r: r.teacher_top_k and r.on_policy_share,
        "{r.teacher_top_k} with on_policy_share {r.on_policy_share:g}: the teacher must be there to judge new answers",
        "--teacher_top_k 0; or --on_policy_share 0",
    ),
    Rule(
        "streaming teacher_top_k",
        lambda r: r.streaming and r.teacher_top_k,
        "with teacher_top_k {r.teacher_top_k}: the teacher reads the data before the first step",
        "--streaming false; or --teacher_top_k 0",
    ),
    Rule(
        "new_tokens objective",
        lambda r: r.declared.has_teacher and r.new_tokens,
        "given with objective distil: the teacher has no probability for them",
        "leave it out",
    ),
    *(
        Rule(
            f"{name} objective",
            partial(lambda name, r: r.declared.head != "words" and is_given(r, name), name),
            "given with objective {r.objective}, " + why,
            "leave it out",
        )
        for name, why in (
            ("streaming", "whose data are read before the first step"),
            ("predict_with_generate", "which writes no answers"),
            ("new_tokens", "with which rows of tokens do not train alone"),
            ("trainable_tokens", "with which rows of tokens do not train alone"),
            ("qat", "with which no rounding was shown"),
            ("fp8", "with which no rounding was shown"),
            ("router_aux_loss_coef", "which has no loss of routers, as in transformers"),
            ("system_prompt", "whose texts are read as they are"),
        )
    ),
    Rule(
        "labels",
        lambda r: r.labels and len({*r.labels}) < len(r.labels),
        "one of them twice, in {r.labels}",
        "give each once",
    ),
    Rule(
        "packing objective",
        lambda r: r.packing and r.declared.rows == "contrasts",
        "given with objective embed, whose rows hold texts of any number",
        "--packing false",
    ),
    Rule(
        "lora_dropout objective",
        lambda r: r.declared.head == "embedding" and r.method != "full" and r.lora_dropout,
        "{r.lora_dropout:g} with objective embed: two passes over a text would differ",
        "--lora_dropout 0",
    ),
    Rule("rewards objective", lambda r: r.objective == "grpo" and not r.rewards, "none given", "--rewards number"),
    Rule("rewards", _bad_pattern, "{it}", "a pattern of Python's re; with a comma in it in a recipe, as a list"),
    Rule(
        "reward_weights rewards",
        lambda r: r.reward_weights is not None and len(r.reward_weights) != len(r.rewards),
        "{r.reward_weights}, for rewards {r.rewards}",
        "give one number for each of rewards",
    ),
    Rule(
        "global_batch_size num_generations",
        lambda r: r.declared.rolls_out and r.global_batch_size % r.num_generations,
        "{r.global_batch_size} answers a step, in groups of num_generations {r.num_generations}",
        "make it a multiple of num_generations",
    ),
    Rule(
        "beta policy_loss",
        lambda r: r.declared.rolls_out and r.beta and r.policy_loss == "rloo",
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
        lambda r: r.declared.rolls_out and r.vllm_server_base_url and r.method == "full",
        "given with method full: the call by which vLLM 0.32 replaces all weights left some models wrong",
        "--method lora; or leave it out, and the model writes its answers itself",
    ),
    Rule(
        "vllm_server_base_url adapter_type use_dora trainable_tokens new_tokens lora_modules_to_save",
        lambda r: (
            r.declared.rolls_out
            and r.vllm_server_base_url
            and (r.adapter_type != "lora" or r.use_dora or r.trainable_tokens or r.new_tokens or r.lora_modules_to_save)
        ),
        "given with what vLLM does not serve: adapters other than LoRA, DoRA, rows of tokens, or whole modules",
        "plain LoRA; or leave it out, and the model writes its answers itself",
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
        "{r.max_length} tokens of prompt and answer, with max_new_tokens {r.max_new_tokens}",
        "--max_length of the longest prompt and max_new_tokens together",
    ),
    Rule(
        "train_on objective",
        lambda r: r.rolls_out and r.train_on == "all",
        "all, with objective {r.objective}, which answers the prompts of the data",
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
        lambda r: r.declared.rows != "answers" and r.train_on == "all",
        "all, with objective {r.objective}, which does not learn to write",
        "--train_on assistant",
    ),
    Rule(
        "excess_length_strategy objective",
        lambda r: r.declared.rows != "answers" and r.excess_length_strategy == "split",
        "split, with objective {r.objective}: what is compared or judged cannot be in pieces",
        "--excess_length_strategy truncate cuts the prompt; or --excess_length_strategy drop",
    ),
    Rule(
        "streaming objective",
        lambda r: r.streaming and r.objective == "kto",
        "with objective kto, which also reads each prompt with the answer to another one",
        "--streaming false",
    ),
    Rule(
        "streaming objective method precompute_reference adapter_name_or_path",
        lambda r: r.streaming and r.objective != "kto" and r.precomputes_reference,
        "with objective {r.objective}, whose reference is computed before the first step",
        "--streaming false; or new adapters without precompute_reference: the reference is the model without them",
    ),
)
