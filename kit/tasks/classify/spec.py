"""Classifiers: a sequence-classification head with an output for each label."""

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
    problem_type: Literal["single_label_classification", "multi_label_classification"] | None = identity_option(
        None, "classify: single-label or multi-label; default: multi-label if the column holds lists"
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
        ),
        rules=(
            Rule(
                "labels",
                lambda r: r.labels and len({*r.labels}) < len(r.labels),
                "a name twice, in {r.labels}",
                "give each once",
            ),
        ),
    )
}
