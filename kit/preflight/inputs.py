"""The checks of model, data and output folder that read only their files.

Promises: what is wrong with these files is reported before torch is imported. All problems found are reported together.
Nothing is written, and no hub is asked: ``kit.preflight.preflight`` does that.
"""

from collections.abc import Sequence
from pathlib import Path

from kit.config.dataset_entry import DatasetEntry
from kit.config.recipe import Recipe
from kit.system.errors import Problems, UserError


def check_inputs(recipe: Recipe, needs_weights: bool = True) -> None:
    """Look at the folders of model and adapter, the columns of the data, and the output folder.

    ``kit.preflight`` looks at them again, with everything else, and reports the same in the same words. Columns for
    which it has a mapping are left to it, because it goes on with the mapping.

    Args:
        recipe: without ``output_dir`` for a command that has none.
        needs_weights: whether a model without weights is a problem.

    Raises:
        UserError: with all problems.
    """
    # Imported here, so that a mistyped flag is reported before them.
    from kit.data.kinds.kinds import KINDS
    from kit.data.samples.dataset import open_datasets
    from kit.model.pretrained.locate import folder_problems
    from kit.run.output_dir import run_in

    problems = Problems()
    train, evaluation = recipe.dataset_entries, recipe.eval_dataset_entries
    # Together or not at all: the fix for one depends on how many there are.
    if _are_quick(train, "dataset") and _are_quick(evaluation, "eval_dataset"):
        with problems.caught():
            open_datasets(train, evaluation, recipe.streaming, KINDS[recipe.declared.rows], proposed=[])
    problems += folder_problems(recipe, needs_weights)
    with problems.caught():
        if recipe.output_dir:
            run_in(recipe.overwrite_output_dir, Path(recipe.output_dir), recipe.inputs)
    problems.raise_if_any()


def _are_quick(entries: Sequence[DatasetEntry], flag: str) -> bool:
    """Whether the columns of all are known without a network."""
    from kit.data.read.sources import hub_id
    from kit.data.read.stores import is_url

    for entry in entries:
        try:
            if is_url(entry.path) or hub_id(entry.path, entry.split or "", flag):
                return False
        except UserError:
            pass  # there is no such file, which takes no time to report
    return True
