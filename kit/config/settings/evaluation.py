"""Settings of the evaluation."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from kit.config.settings.data import ENTRIES, Entries
from kit.schema.fields import (
    FRACTION_OR_COUNT,
    STRICT,
    comma_separated,
    fraction_or_count,
    option,
)
from kit.schema.rules import Rule, is_given, steps_rules
from kit.scoring.own_metric import OwnMetric, is_own, key_of

_option = partial(option, "Evaluation")
# What one of ``metrics`` or ``rewards`` needs.
METRIC_PACKAGES = {"math": "math_verify", "bleu": "sacrebleu", "chrf": "sacrebleu", "rouge_l": "rouge_score"}
MetricName = Literal["exact_match", "number", "token_f1", "bleu", "chrf", "rouge_l", "tool_calls"]
# Also a user's metric, and several answers to each prompt.
_FOLLOWED = r"^eval_([A-Za-z_]\w*(/(pass|best)@\d+)?|rewards/(accuracies|margins))$"


class EvalSettings(BaseModel):
    """Evaluation data, when to evaluate, and when to end early."""

    model_config = STRICT

    eval_dataset: Entries | None = _option(
        None, "evaluation data, given like dataset; default: the split of eval_split_size", expected=ENTRIES
    )
    eval_dataset_split: str = _option("test", "split of eval_dataset where it has several", needs="eval_dataset")
    eval_split_size: Annotated[float, AfterValidator(fraction_or_count)] = _option(
        0.0,
        "samples of dataset held out for evaluation, chosen by seed; below 1 a fraction; 0: none",
        "samples",
        ge=0,
        expected=FRACTION_OR_COUNT,
    )
    max_eval_samples: int | None = _option(
        None, "evaluate on the first N samples only", "samples", ge=1, needs="eval_dataset or eval_split_size"
    )
    per_device_eval_batch_size: int | None = _option(
        None,
        "samples per evaluation micro-batch; default: per_device_train_batch_size",
        "samples",
        ge=1,
        needs="eval_dataset or eval_split_size or precomputes_reference or rolls_out",
    )
    eval_strategy: Literal["no", "steps", "epoch"] | None = _option(
        None, "when to evaluate before the end: every eval_steps, after each epoch, or not; default: follows eval_steps"
    )
    eval_steps: Annotated[float, AfterValidator(fraction_or_count)] = _option(
        0,
        "evaluate every N steps; below 1 a fraction of all steps; 0: at the end only",
        "steps",
        ge=0,
        expected=FRACTION_OR_COUNT,
    )
    eval_on_start: bool = _option(False, "evaluate before the first step too")
    metric_for_best_model: Annotated[str, Field(pattern=_FOLLOWED)] = _option(
        "eval_loss",
        "metric that keep_best and early stopping follow; rewards/... with preference pairs",
        expected="eval_loss, eval_rewards/accuracies, eval_rewards/margins, or eval_ and the name of one of metrics "
        "or of a metric of the objective",
        needs="keep_best or early_stopping_patience",
    )
    early_stopping_patience: int | None = _option(
        None, "end the run after N evaluations in a row without a better metric_for_best_model", "evaluations", ge=1
    )
    predict_with_generate: bool = _option(
        False, "also generate each sample's last answer, by default greedily, and report exact match"
    )
    metrics: Annotated[list[MetricName | OwnMetric], BeforeValidator(comma_separated)] = _option(
        ["exact_match"],
        "metrics of generated answers, separated by commas; as a flag also your own function(expected, answer, row)",
        expected="names of exact_match, number, token_f1, bleu, chrf, rouge_l, tool_calls, and FILE.py:FUNCTION",
        needs="predict_with_generate",
    )
    max_new_tokens: int = _option(
        128, "maximum length of a generated answer", "tokens", ge=1, needs="predict_with_generate or rolls_out"
    )
    temperature: float | None = _option(
        None,
        "sampling temperature of generated answers; default: greedy",
        ge=0.01,
        le=10,
        needs="predict_with_generate",
    )
    top_p: float | None = _option(
        None,
        "with a temperature: nucleus sampling, from the likeliest tokens with this total probability",
        ge=0.001,
        le=1,
    )
    num_return_sequences: int = _option(
        1, "with a temperature: answers to each prompt; metrics are their mean, and pass@N or best@N", "answers", ge=1
    )

    @property
    def has_evaluation(self) -> bool:
        """Whether there is evaluation data: an ``eval_dataset``, or a split of the training data."""
        return self.eval_dataset is not None or self.eval_split_size > 0

    @property
    def results_of_answers(self) -> list[str]:
        """The results of generated answers in an evaluation: ``eval_exact_match``, ``eval_number/pass@8``."""
        if not self.predict_with_generate:
            return []
        keys = dict.fromkeys(["exact_match", *map(key_of, self.metrics)])
        num = self.num_return_sequences
        best = {
            key: "pass" if key in ("exact_match", "number", "tool_calls") else "best" for key in keys if key != "bleu"
        }
        return [f"eval_{key}" for key in keys] + [f"eval_{key}/{best[key]}@{num}" for key in best if num > 1]


def _repeated_key(settings: EvalSettings) -> str | None:
    """The user's metric whose result would have the name of another one."""
    keys = ["loss", "perplexity", "tokens", *map(key_of, settings.metrics)]
    return next((name for name in settings.metrics if is_own(name) and keys.count(key_of(name)) > 1), None)


def _not_computed(recipe: Any) -> str:
    """The metrics that can be followed, if metric_for_best_model is none of them."""
    known = ["eval_loss"]
    if recipe.train_on != "all":  # else there are no prompts
        known += recipe.results_of_answers
        known += ["eval_reward"] * bool(recipe.rewards and recipe.predict_with_generate)
    known += [f"eval_{metric.key}" for metric in recipe.declared.metrics if metric.is_followed]
    return "" if recipe.metric_for_best_model in known else ", ".join(known)


RULES = (
    Rule(
        "eval_split_size eval_dataset",
        None,
        "given together with eval_dataset",
        "--eval_split_size 0; or leave out --eval_dataset: a split is held out of training, an eval_dataset is not",
    ),
    *(
        Rule(
            f"{name} eval_dataset eval_split_size",
            partial(lambda name, r: is_given(r, name) and getattr(r, name) != "no" and not r.has_evaluation, name),
            "nothing to evaluate on",
            "--eval_dataset FILE; or --eval_split_size 0.1, which holds a tenth of the data out of training",
        )
        for name in """
        eval_steps eval_strategy eval_on_start predict_with_generate early_stopping_patience keep_best""".split()
    ),
    *steps_rules("eval"),
    Rule(
        "early_stopping_patience eval_steps eval_strategy",
        lambda r: r.early_stopping_patience and not r.eval_steps and r.eval_strategy != "epoch",
        "given without an evaluation before the end",
        "--eval_strategy steps --eval_steps 100",
    ),
    Rule(
        "metrics",
        _repeated_key,
        "{it} would have the name of another result",
        "rename the function",
    ),
    *(
        Rule(
            f"{name} temperature",
            partial(lambda name, r: is_given(r, name) and r.temperature is None, name),
            f"{{r.{name}:g}} without temperature: answers are greedy",
            "--temperature 1",
        )
        for name in ("top_p", "num_return_sequences")
    ),
    Rule(
        "metric_for_best_model objective keep_best early_stopping_patience",
        lambda r: (
            r.declared.rolls_out
            and (r.keep_best or r.early_stopping_patience)
            and "metric_for_best_model" not in r.model_fields_set
        ),
        "not given with objective {r.objective}: eval_loss need not fall as rewards rise",
        "--metric_for_best_model eval_exact_match, or another of --metrics, with --predict_with_generate true",
    ),
    Rule(
        "metric_for_best_model predict_with_generate metrics num_return_sequences train_on objective",
        _not_computed,
        "{r.metric_for_best_model}, which these evaluations do not compute: they have {it}",
        "--metric_for_best_model eval_loss; or --predict_with_generate true, and its name in --metrics",
    ),
)
