"""KTO: single answers with a desirable or undesirable label."""

from pydantic import BaseModel

from kit.schema.rules import Rule
from kit.tasks.preference.spec import MARGIN
from kit.tasks.spec import KL, TaskSpec, identity_option


class KtoSettings(BaseModel):
    """What only kto reads."""

    desirable_weight: float = identity_option(1.0, "kto: weight of answers with the label true", gt=0)
    undesirable_weight: float = identity_option(1.0, "kto: weight of answers with the label false", gt=0)


# The rates are from TRL's script, and its documentation names 5e-7 to 5e-6 as the range; LLaMA-Factory's LoRA example,
# also for beta.
SPECS = {
    "kto": TaskSpec(
        "kit.tasks.kto.loss.KahnemanTversky",
        "unpaired_preference",
        ("beta", *KtoSettings.model_fields, "precompute_reference"),
        beta=0.1,
        has_reference=True,
        has_mismatched=True,
        learning_rates=(5e-7, 5e-6),
        metrics=(MARGIN, KL),
        rules=(
            Rule(
                "streaming objective",
                lambda r: r.streaming,
                "with objective kto, which estimates the KL term on mismatched prompt-completion pairs",
                "--streaming false",
            ),
        ),
    )
}
