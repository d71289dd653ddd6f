"""Classifiers and regression: a sequence-classification head with an output for each label or number."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator

from kit.schema.fields import comma_separated
from kit.schema.rules import Rule
from kit.tasks.spec import TaskMetric, TaskSpec, identity_option


class ClassifySettings(BaseModel):
    """What only classify reads."""

    labels: Annotated[list[str] | None, BeforeValidator(comma_separated)] = identity_option(
        None, "classify: names of the labels, in order; default: the model's, or those of the training data"
    )
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = (
        identity_option(None, "classify: default: multi-label if the column holds lists, else single-label")
    )


# The rates are those of sft, and so those of the examples of transformers.
SPECS = {
    "classify": TaskSpec(
        "kit.tasks.classify.loss.Classification",
        "classification",
        tuple(ClassifySettings.model_fields),
        head="scores",
        metrics=(
            TaskMetric("accuracy", "accuracy", ".1%", "accuracy, %", is_followed=True),
            TaskMetric("f1", "macro F1", chart="macro F1", is_followed=True),
            TaskMetric("pearson", "Pearson", chart="Pearson correlation", is_followed=True),
            TaskMetric("spearman", "Spearman", chart="Spearman correlation", is_followed=True),
        ),
        rules=(
            Rule(
                "metric_for_best_model problem_type",
                lambda r: (
                    r.metric_for_best_model
                    in (
                        ("eval_accuracy", "eval_f1")
                        if r.problem_type == "regression"
                        else ("eval_pearson", "eval_spearman")
                    )
                ),
                "{r.metric_for_best_model}, with problem_type {r.problem_type}",
                "of labels eval_accuracy or eval_f1; with --problem_type regression eval_pearson or eval_spearman",
            ),
            Rule(
                "labels",
                lambda r: r.labels and len({*r.labels}) < len(r.labels),
                "a name twice, in {r.labels}",
                "give each once",
            ),
        ),
        variant=lambda r: "kit.tasks.classify.loss.Regression" if r.problem_type == "regression" else "",
    )
}
