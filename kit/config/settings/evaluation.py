"""Settings of the evaluation."""

from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from kit.config.fields import (
    SHARE_OR_COUNT,
    STRICT,
    comma_separated,
    option,
    share_or_count,
)
from kit.config.settings.data import ENTRIES, Entries
from kit.own_metric import PATTERN

_option = partial(option, "Evaluation")
# What one of ``metrics`` needs.
METRIC_PACKAGES = {"bleu": "sacrebleu", "chrf": "sacrebleu", "rouge_l": "rouge_score"}
MetricName = Literal["exact_match", "number", "token_f1", "bleu", "chrf", "rouge_l"]
OwnMetric = Annotated[str, Field(pattern=f"^{PATTERN}$")]  # code, so the command line only: kit/config/recipe_file.py
_OF_ANSWERS = r"^eval_[A-Za-z_]\w*(/(pass|best)@\d+)?$"  # also of an own metric, and of several answers to each prompt


class EvalSettings(BaseModel):
    """Evaluation data, when to evaluate, and when to end early."""

    model_config = STRICT

    eval_dataset: Entries | None = _option(
        None, "evaluation data, given like dataset; default: the split of eval_split_size", expected=ENTRIES
    )
    eval_dataset_config: str | None = _option(None, "config of eval_dataset; default: dataset_config")
    eval_dataset_split: str = _option("test", "split of eval_dataset where it has several")
    eval_dataset_revision: str | None = _option(
        None, "branch, tag or commit of eval_dataset; default: that of the same hub id in dataset"
    )
    eval_split_size: Annotated[float, AfterValidator(share_or_count)] = _option(
        0.0,
        "held out of dataset for evaluation, chosen by seed; below 1 a share; 0: none",
        "samples",
        ge=0,
        expected=SHARE_OR_COUNT,
    )
    max_eval_samples: int | None = _option(None, "evaluate on the first N samples only", "samples", ge=1)
    per_device_eval_batch_size: int | None = _option(
        None, "samples per evaluation micro-batch; default: per_device_train_batch_size", "samples", ge=1
    )
    eval_strategy: Literal["no", "steps", "epoch"] | None = _option(
        None, "when to evaluate before the end: every eval_steps, after each epoch, or not; default: follows eval_steps"
    )
    eval_steps: Annotated[float, AfterValidator(share_or_count)] = _option(
        0,
        "evaluate every N steps; below 1 a share of all steps; 0: at the end only",
        "steps",
        ge=0,
        expected=SHARE_OR_COUNT,
    )
    eval_on_start: bool = _option(False, "evaluate before the first step too")
    metric_for_best_model: (
        Literal[
            "eval_loss",
            "eval_rewards/accuracies",
            "eval_rewards/margins",
            "eval_exact_match",
            "eval_number",
            "eval_token_f1",
            "eval_bleu",
            "eval_chrf",
            "eval_rouge_l",
        ]
        | Annotated[str, Field(pattern=_OF_ANSWERS)]
    ) = _option(
        "eval_loss",
        "what keep_best and early stopping follow; rewards are of objectives over pairs",
        expected="eval_loss, eval_rewards/accuracies, eval_rewards/margins, or eval_ and the name of one of metrics",
    )
    early_stopping_patience: int | None = _option(
        None, "end the run after N evaluations in a row without a better metric_for_best_model", "evaluations", ge=1
    )
    early_stopping_threshold: float = _option(
        0.0,
        "a metric_for_best_model counts as better only if it is better than the best so far by more than this",
        ge=0,
    )
    predict_with_generate: bool = _option(
        False, "also generate each sample's last answer, by default greedily, and report the share of exact matches"
    )
    metrics: Annotated[list[MetricName | OwnMetric], BeforeValidator(comma_separated)] = _option(
        ["exact_match"],
        "of generated answers, separated by commas; as a flag also your own function(expected, answer, row)",
        expected="names of exact_match, number, token_f1, bleu, chrf, rouge_l, and FILE.py:FUNCTION,",
    )
    max_new_tokens: int = _option(128, "longest generated answer", "tokens", ge=1)
    temperature: float | None = _option(
        None, "draw answers from probabilities of this temperature; default: greedy", ge=0.01, le=10
    )
    top_p: float | None = _option(
        None, "with a temperature: draw from the likeliest tokens that together have this probability", ge=0.001, le=1
    )
    num_return_sequences: int = _option(
        1, "with a temperature: answers to each prompt; metrics are their mean, and of the best one", "answers", ge=1
    )

    @property
    def has_evaluation(self) -> bool:
        """Whether there is evaluation data: an ``eval_dataset``, or a split of the training data."""
        return self.eval_dataset is not None or self.eval_split_size > 0
