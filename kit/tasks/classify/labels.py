"""The labels of a classifier, or the names of the numbers of a regression, in the order of its outputs."""

from collections.abc import Sequence

from kit.config.recipe import Recipe
from kit.data.samples.dataset import Dataset
from kit.data.samples.labels import find_labels
from kit.model.build import open_base_config
from kit.model.pretrained.heads import head_of, labels_of
from kit.run.model_source import run_of
from kit.run.record import read_run
from kit.system.errors import UserError, listed


def with_labels(recipe: Recipe, datasets: Sequence[Dataset]) -> Recipe:
    """Return the recipe with the labels of the model, if it has some, or else of the training data; and their kind.

    Raises ``UserError`` if their order is another one than that of the scores, or is not known.
    """
    base = open_base_config(recipe)
    own: list[str] = []
    kind = base.problem_type
    if head_of(base) == "scores":
        own = labels_of(base) or [str(i) for i in range(base.num_labels)]
    if recipe.adapter_name_or_path:
        run_file = run_of(recipe.adapter_name_or_path)
        if run_file and (run := read_run(run_file)[0]).labels:
            own, kind = run.labels, run.problem_type
        elif not own and not recipe.labels:
            found, expected = "missing, and the adapter does not hold their order", "those that it was trained with"
            raise UserError("labels", found, expected, "--labels NAMES, in the order of id2label in README.md")
    if recipe.labels and recipe.labels != own and sorted(recipe.labels) == sorted(own):
        found = f"{listed(recipe.labels)}, in another order than the scores of the model"
        raise UserError("labels", found, listed(own), "leave it out")
    labels = own
    if not own and not (recipe.labels and recipe.problem_type):  # a checkpoint of the kit has both
        labels, has_several = find_labels(datasets, recipe.problem_type == "regression")
        kind = "multi_label_classification" if has_several else "single_label_classification"
    kind = recipe.problem_type or kind or "single_label_classification"
    return recipe.model_copy(update={"labels": recipe.labels or labels, "problem_type": kind})
