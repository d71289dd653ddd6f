"""Supervised fine-tuning (SFT), and with token weights: DFT, EAFT."""

from pydantic import BaseModel

from kit.tasks.spec import TaskSpec, identity_option


class SftSettings(BaseModel):
    """What only SFT, DFT and EAFT read."""

    label_smoothing_factor: float = identity_option(
        0.0,
        "sft: label smoothing; probability of each target that is spread evenly over the vocabulary",
        ge=0,
        lt=1,
    )
    z_loss_coef: float = identity_option(
        0.0,
        "sft: z-loss; this times (log of the sum of exponentiated logits)^2 is added for each token; PaLM: 1e-4",
        ge=0,
        le=1,
    )
    eaft_alpha: float = identity_option(1.0, "eaft: exponent of the entropy weight of a token", gt=0, le=100)
    neftune_noise_alpha: float = identity_option(
        0.0,
        "sft, dft, eaft: NEFTune; uniform noise on the input embeddings, up to this / sqrt(tokens * size)",
        ge=0,
        le=1000,
    )


# As tensors show it: in float32 the log-softmax of logits and gradients, and log Z's of z-loss.
SPECS = {
    "sft": TaskSpec(
        settings=("label_smoothing_factor", "z_loss_coef", "neftune_noise_alpha"),
        logit_bytes=lambda r: 20 if r.z_loss_coef else 12 if r.label_smoothing_factor else 0,
        variant=lambda r: (
            "kit.tasks.sft.loss.ZLoss"
            if r.z_loss_coef
            else "kit.tasks.sft.loss.SmoothedLoss"
            if r.label_smoothing_factor
            else ""
        ),
    ),
    "dft": TaskSpec("kit.tasks.sft.loss.DynamicFineTuning", settings=("neftune_noise_alpha",)),
    "eaft": TaskSpec(
        "kit.tasks.sft.loss.EntropyAdaptive",
        settings=("eaft_alpha", "neftune_noise_alpha"),
        logit_bytes=lambda r: 12,
    ),
}
