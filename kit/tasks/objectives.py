"""Which class the setting ``objective`` names."""

from collections.abc import Sequence
from pkgutil import resolve_name

from kit.config.settings.objective import ObjectiveSettings
from kit.run.run import Run
from kit.tasks.base import Objective


def objective_class(settings: ObjectiveSettings) -> type[Objective]:
    """Return the class that the setting ``objective`` names, or the variant of it that other settings choose."""
    named: type[Objective] = resolve_name(settings.declared.variant(settings) or settings.declared.loss)
    return named


def build_objective(settings: ObjectiveSettings, dataset_names: Sequence[str]) -> Objective:
    """Create an objective outside of a run, which has no teacher."""
    return objective_class(settings)(dataset_names, settings)


def open_objective(run: Run) -> Objective:
    """Create the objective of a run, see ``Objective.open``."""
    return objective_class(run.checked.recipe).open(run)
