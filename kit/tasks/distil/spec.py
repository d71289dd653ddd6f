"""Knowledge distillation: a student minimises the divergence from a teacher's token distribution."""

from typing import Any, Literal

from pydantic import BaseModel

from kit.schema.fields import SERVER
from kit.schema.rules import Rule
from kit.tasks.spec import TaskMetric, TaskSpec, identity_option, objective_option


class DistilSettings(BaseModel):
    """What only distillation reads."""

    teacher: str | None = identity_option(
        None,
        "distil: local folder or hub id of the teacher, which has the same tokenizer; or its name on teacher_server",
    )
    teacher_server: str | None = objective_option(
        None, "distil: vLLM server with the teacher, for teacher_top_k; for example http://localhost:8000", **SERVER
    )
    teacher_revision: str | None = objective_option(None, "distil: branch, tag or commit of a teacher with a hub id")
    teacher_in_4bit: bool = identity_option(False, "distil: quantise the teacher to 4 bits (NF4)")
    teacher_top_k: int = identity_option(
        0,
        "distil: offline, from the teacher's top-k log-probabilities, cached before training; 0: online, all tokens",
        "tokens",
        ge=0,
    )
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = identity_option(
        "forward_kl",
        "distil: forward KL(teacher || student), reverse KL(student || teacher), or generalised JSD with beta",
    )
    distil_temperature: float = identity_option(
        1.0, "distil: divides both models' logits, and the divergence is multiplied by its square", gt=0
    )
    cross_entropy_weight: float = identity_option(
        0.0, "distil: fraction of hard-label cross-entropy in the loss", ge=0, lt=1
    )
    on_policy_share: float = identity_option(
        0.0,
        "distil: fraction of on-policy (student-generated) sequences, GKD's lambda; others keep the data's answer",
        ge=0,
        le=1,
    )


def _logit_bytes(settings: Any) -> int:
    """As tensors show it: in float32 the log-softmax of both models' logits and gradients."""
    return 25 if settings.teacher_top_k else 48 if settings.divergence == "jsd" else 30


RULES = (
    Rule("teacher objective", lambda r: not r.teacher, "none given", "--teacher MODEL"),
    Rule(
        "beta divergence",
        lambda r: r.beta and (r.divergence != "jsd" or r.beta >= 1),
        "{r.beta:g} with divergence {r.divergence}",
        "--divergence jsd with beta between 0 and 1; or leave it out",
    ),
    Rule(
        "teacher_top_k on_policy_share",
        None,
        "{r.teacher_top_k} with on_policy_share {r.on_policy_share:g}: the teacher must score new completions online",
        "--teacher_top_k 0; or --on_policy_share 0",
    ),
    Rule(
        "teacher_server teacher_top_k",
        lambda r: r.teacher_server and not r.teacher_top_k,
        "given with teacher_top_k 0: it is asked before the first step",
        "--teacher_top_k 20, or what vllm serve --max-logprobs allows",
    ),
    Rule(
        "distil_temperature teacher_server",
        lambda r: (
            r.distil_temperature != 1 and (r.teacher_server or any(entry.teacher_server for entry in r.dataset_entries))
        ),
        "{r.distil_temperature:g}, and a server gives log-probabilities at 1",
        "--distil_temperature 1",
    ),
    Rule(
        "streaming teacher_top_k",
        None,
        "with teacher_top_k {r.teacher_top_k}: the teacher reads the data before the first step",
        "--streaming false; or --teacher_top_k 0",
    ),
    Rule(
        "new_tokens objective",
        lambda r: r.new_tokens,
        "given with objective distil: the teacher has no probability for them",
        "leave it out",
    ),
)

# The rates are those of sft.
SPECS = {
    "distil": TaskSpec(
        "kit.tasks.distil.loss.Distillation",
        settings=("beta", "vllm_server_timeout", *DistilSettings.model_fields),
        beta=0.5,
        metrics=(
            TaskMetric("divergence", chart="divergence from the teacher, nats"),
            TaskMetric("teacher_agreement", digits=".1%", chart="top-1 agreement with the teacher, %"),
        ),
        rules=RULES,
        logit_bytes=_logit_bytes,
    ),
}
