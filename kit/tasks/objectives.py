"""Which class the setting ``objective`` names."""

from collections.abc import Sequence
from pkgutil import resolve_name

from kit.config.settings.objective import ObjectiveSettings
from kit.tasks.base import Objective
from kit.tasks.distil.loss import Distillation
from kit.tasks.distil.stored_teacher import StoredTeacher
from kit.tasks.distil.teacher import Teacher
from kit.tasks.sft.loss import SmoothedLoss, SupervisedLoss, ZLoss


def objective_class(settings: ObjectiveSettings) -> type[Objective]:
    """Return the class that the setting ``objective`` names; of sft the one with the terms that are asked for."""
    named: type[Objective] = resolve_name(settings.declared.loss)
    if named is SupervisedLoss and settings.z_loss_coef:
        return ZLoss
    return SmoothedLoss if named is SupervisedLoss and settings.label_smoothing_factor else named


def build_objective(
    settings: ObjectiveSettings, dataset_names: Sequence[str], teacher: Teacher | StoredTeacher | None = None
) -> Objective:
    """Create the objective that the setting ``objective`` names, see ``Objective``."""
    if teacher:
        return Distillation(dataset_names, settings, teacher)
    return objective_class(settings)(dataset_names, settings)
