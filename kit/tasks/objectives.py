"""Which class the setting ``objective`` names."""

from collections.abc import Sequence

from kit.config.settings.objective import ObjectiveSettings
from kit.tasks.base import Objective
from kit.tasks.classify.loss import Classification
from kit.tasks.distil.loss import Distillation
from kit.tasks.distil.stored_teacher import StoredTeacher
from kit.tasks.distil.teacher import Teacher
from kit.tasks.embed.loss import Embedding
from kit.tasks.grpo.loss import PolicyLoss
from kit.tasks.kto.loss import KahnemanTversky
from kit.tasks.preference.loss import ContrastivePreference, DirectPreference, OddsRatio, SimplePreference
from kit.tasks.reward.loss import RewardModelling
from kit.tasks.sft.loss import DynamicFineTuning, EntropyAdaptive, SmoothedLoss, SupervisedLoss, ZLoss

# By the name that the setting ``objective`` gives. DECLARED in kit/config/settings/objective.py has the same names.
OBJECTIVES: dict[str, type[Objective]] = {
    "sft": SupervisedLoss,
    "dft": DynamicFineTuning,
    "eaft": EntropyAdaptive,
    "distil": Distillation,
    "dpo": DirectPreference,
    "orpo": OddsRatio,
    "simpo": SimplePreference,
    "cpo": ContrastivePreference,
    "kto": KahnemanTversky,
    "reward": RewardModelling,
    "classify": Classification,
    "embed": Embedding,
    "grpo": PolicyLoss,
}


def build_objective(
    settings: ObjectiveSettings, dataset_names: Sequence[str], teacher: Teacher | StoredTeacher | None = None
) -> Objective:
    """Create the objective that the setting ``objective`` names, see ``Objective``."""
    if teacher:
        return Distillation(dataset_names, settings, teacher)
    named = OBJECTIVES[settings.objective]
    if named is SupervisedLoss and settings.z_loss_coef:
        named = ZLoss
    elif named is SupervisedLoss and settings.label_smoothing_factor:
        named = SmoothedLoss
    return named(dataset_names, settings)
