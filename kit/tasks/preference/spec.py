"""Preference optimisation on pairs of a chosen and a rejected answer: DPO, ORPO, SimPO, CPO."""

from typing import Any, Literal

from pydantic import BaseModel

from kit.schema.rules import Rule
from kit.tasks.spec import TaskMetric, TaskSpec, identity_option


class DpoSettings(BaseModel):
    """What only dpo reads."""

    dpo_loss: Literal["sigmoid", "ipo", "hinge", "robust", "sigmoid_norm", "apo_zero", "apo_down", "bco_pair"] = (
        identity_option("sigmoid", "dpo: loss of a pair; sigmoid_norm is length-normalised sigmoid")
    )
    label_smoothing: float = identity_option(
        0.0,
        "dpo with sigmoid, sigmoid_norm, robust: assumed probability of flipped preference labels (cDPO)",
        ge=0,
        lt=0.5,
    )
    rpo_alpha: float = identity_option(0.0, "dpo: weight of the cross-entropy of the chosen answers (RPO)", ge=0)


class SimpoSettings(BaseModel):
    """What only simpo reads."""

    simpo_gamma: float = identity_option(0.5, "simpo: target reward margin", ge=0)


class CpoSettings(BaseModel):
    """What only cpo reads."""

    cpo_alpha: float = identity_option(1.0, "cpo: weight of the cross-entropy of the chosen answers", ge=0)


ACCURACY = TaskMetric("rewards/accuracies", "accuracy", ".1%", "preference accuracy, %", is_followed=True)
MARGIN = TaskMetric("rewards/margins", "margin", "z.4f", "reward margin", is_followed=True)  # z: no -0.0000
DPO_RULES = (
    Rule(
        "label_smoothing dpo_loss objective",
        lambda r: r.label_smoothing and r.dpo_loss not in ("sigmoid", "sigmoid_norm", "robust"),
        "given with dpo_loss {r.dpo_loss}",
        "--label_smoothing 0; or --dpo_loss sigmoid",
    ),
    Rule(
        "dpo_loss label_smoothing objective",
        lambda r: r.dpo_loss == "robust" and not r.label_smoothing,
        "robust without label_smoothing",
        "--label_smoothing 0.1, the probability of flipped labels; or --dpo_loss sigmoid",
    ),
)


def _spec(loss: str, settings: tuple[str, ...], **more: Any) -> TaskSpec:
    """Return the spec of an objective on preference pairs."""
    loss = f"kit.tasks.preference.loss.{loss}"
    return TaskSpec(loss, "preference", ("beta", *settings), 2, metrics=(ACCURACY, MARGIN), **more)


# Where the defaults come from, in the order full, adapters, beta:
# - dpo: Zephyr 7B in alignment-handbook, its full and its QLoRA recipe, and Tulu 3 8B in open-instruct for full. Both
#   have a beta of their own; 0.1 is that of TRL and HALOs.
# - orpo: the script of its authors for Mistral-ORPO-beta (github.com/xfactlab/orpo), also for beta; Zephyr 141B QLoRA
#   in alignment-handbook.
# - simpo: its authors recommend 3e-7 to 1e-6 (github.com/princeton-nlp/SimPO), and their code has beta 2 and a margin
#   of a quarter of it. No rate for adapters is published: ten times the other, as with dpo.
# - cpo: TRL's CPOConfig; the LoRA script of its authors (github.com/fe1ixxu/ALMA), also for beta.
SPECS = {
    "dpo": _spec(
        "DirectPreference",
        (*DpoSettings.model_fields, "precompute_reference"),
        beta=0.1,
        has_reference=True,
        learning_rates=(5e-7, 5e-6),
        rules=DPO_RULES,
    ),
    "orpo": _spec("OddsRatio", (), beta=0.1, learning_rates=(5e-6, 5e-5)),
    "simpo": _spec("SimplePreference", tuple(SimpoSettings.model_fields), beta=2.0, learning_rates=(5e-7, 5e-6)),
    "cpo": _spec("ContrastivePreference", tuple(CpoSettings.model_fields), beta=0.1, learning_rates=(1e-6, 1e-4)),
}
