"""What an objective's name implies, before torch is imported.

Each task declares its own in ``kit/tasks/NAME/spec.py``: ``SPECS`` by the names that the setting ``objective`` gives.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from kit.schema.fields import option
from kit.schema.rules import Rule

objective_option = partial(option, "Objective")
identity_option = partial(option, "Objective", identity=True)

# The language-model head, a sequence-classification head on the last token, or none: a text's embedding.
Head = Literal["lm", "scores", "embedding"]


class TaskMetric(NamedTuple):
    """A metric of an objective, in addition to its loss.

    Attributes:
        key: in ``metrics.jsonl``; of an evaluation with ``eval_`` before it.
        title: its name in the lines of steps and evaluations; empty: they do not show it.
        digits: how its value is written: ``.3f``; with a % at the end it is a fraction.
        chart: the title of its chart in a report; empty: it has none.
        is_followed: whether each evaluation computes it, and more of it is better.
    """

    key: str
    title: str = ""
    digits: str = ".3f"
    chart: str = ""
    is_followed: bool = False

    @property
    def is_share(self) -> bool:
        """Whether its values go from 0 to 1."""
        return self.digits.endswith("%")


KL = TaskMetric("kl", "kl", ".4f", "KL to the reference model, nats")


@dataclass(frozen=True)
class TaskSpec:
    """What an objective's name implies.

    Attributes:
        loss: the full name of its class, a ``kit.tasks.base.Objective``.
        variant: takes the settings and returns the full name of the class that they choose instead; empty: ``loss``.
        rows: the dataset type: the module of kit/data/kinds/ that reads it.
        settings: the settings of ``ObjectiveSettings`` that it reads; with any other objective they have no effect.
        sequences_per_sample: 2 of a pair: the prompt with each of its answers. Without negatives.
        beta: the default of ``beta``; None: it does not read it.
        has_reference: it compares the model with the reference model, the initial policy.
        has_mismatched: it needs mismatched prompt-completion pairs, for KTO's KL term (``kit.data.feed.mismatched``).
        learning_rates: the default peak rate for full training, and for adapters.
        rolls_out: it trains on completions that the model generates.
        head: the head of the model.
        scores: the names of the outputs of a sequence-classification head, if the data do not name them.
        metrics: in the order in which lines show them.
        rules: refused settings.
        logit_bytes: takes the settings and returns the bytes that a logit takes where autograd differentiates a loss of
            its own; 0: plain cross-entropy.
        num_passes: forward passes without gradients over the tokens of a step, apart from those of the reference model.
    """

    loss: str = "kit.tasks.sft.loss.SupervisedLoss"
    rows: str = "answers"
    settings: tuple[str, ...] = ()
    sequences_per_sample: int = 1
    beta: float | None = None
    has_reference: bool = False
    has_mismatched: bool = False
    learning_rates: tuple[float, float] = (2e-5, 2e-4)
    rolls_out: bool = False
    head: Head = "lm"
    scores: tuple[str, ...] = ()
    metrics: tuple[TaskMetric, ...] = ()
    rules: tuple[Rule, ...] = ()
    logit_bytes: Callable[[Any], int] = lambda settings: 0
    num_passes: int = 0
    variant: Callable[[Any], str] = lambda settings: ""
