"""Embedding models (bi-encoders), trained contrastively on query-positive pairs and hard negatives."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from kit.schema.fields import comma_separated
from kit.schema.rules import Rule
from kit.tasks.spec import TaskMetric, TaskSpec, identity_option


class EmbedSettings(BaseModel):
    """What only embed reads."""

    pooling: Literal["last", "mean"] = identity_option("last", "embed: last-token or mean pooling of the hidden states")
    embed_temperature: float = identity_option(0.05, "embed: temperature of the cosine similarities", gt=0)
    matryoshka_dims: Annotated[list[Annotated[int, Field(ge=1)]], BeforeValidator(comma_separated)] = identity_option(
        [], "embed: Matryoshka dimensions; for each N of them the first N components are trained, too"
    )


# The rates are those of sft, and so those of the examples of sentence-transformers.
SPECS = {
    "embed": TaskSpec(
        "kit.tasks.embed.loss.Embedding",
        "contrastive",
        tuple(EmbedSettings.model_fields),
        sequences_per_sample=2,
        head="embedding",
        metrics=(
            TaskMetric("ndcg_at_10", "nDCG@10", chart="nDCG@10", is_followed=True),
            TaskMetric("mrr", "MRR", is_followed=True),
            TaskMetric("recall_at_1", "recall@1", ".1%", is_followed=True),
            TaskMetric("recall_at_10", is_followed=True),
        ),
        rules=(
            Rule(
                "packing objective",
                lambda r: r.packing,
                "given with objective embed, whose samples have any number of texts",
                "--packing false",
            ),
            Rule(
                "lora_dropout objective",
                lambda r: r.method != "full" and r.lora_dropout,
                "{r.lora_dropout:g} with objective embed: dropout would make the two GradCache passes differ",
                "--lora_dropout 0",
            ),
        ),
        num_passes=1,
    )
}
