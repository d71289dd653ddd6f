"""Which class the setting ``objective`` names."""

from collections.abc import Sequence
from pkgutil import resolve_name

from kit.config.settings.objective import ObjectiveSettings
from kit.tasks.base import Objective
from kit.tasks.distil.loss import Distillation
from kit.tasks.distil.stored_teacher import StoredTeacher
from kit.tasks.distil.teacher import Teacher
from kit.tasks.sft.loss import SmoothedLoss, SupervisedLoss, ZLoss


def build_objective(
    settings: ObjectiveSettings, dataset_names: Sequence[str], teacher: Teacher | StoredTeacher | None = None
) -> Objective:
    """Create the objective that the setting ``objective`` names, see ``Objective``."""
    if teacher:
        return Distillation(dataset_names, settings, teacher)
    named: type[Objective] = resolve_name(settings.declared.loss)
    if named is SupervisedLoss and settings.z_loss_coef:
        named = ZLoss
    elif named is SupervisedLoss and settings.label_smoothing_factor:
        named = SmoothedLoss
    return named(dataset_names, settings)
