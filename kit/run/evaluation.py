"""The result of an evaluation, as a run logs it."""

from dataclasses import dataclass, field
from typing import Any

from kit.data.feed.feed import by_file
from kit.scoring.metrics import exact_match


@dataclass(frozen=True)
class Answer:
    """The model's answer to one evaluation prompt, and the expected answer."""

    prompt: str
    reference: str | None  # the expected answer; None: the row has none
    text: str  # the model's answer
    pictures: list[str] = field(default_factory=list)  # small copies of the first images of the prompt, as data: URIs
    conversation: str = ""  # with tools: all that follows the prompt; ``text`` is its last turn
    reward: float | None = None  # with tools

    @property
    def exact(self) -> bool:
        """Whether the answer equals the reference, apart from whitespace at both ends."""
        return self.reference is not None and bool(exact_match(self.text, self.reference))


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        metrics: the same on every rank. ``eval_loss`` (nats per supervised token), ``eval_perplexity``,
            ``eval_tokens`` (supervised tokens); with several datasets also ``eval_loss/<name>`` and
            ``eval_tokens/<name>``; with generation ``eval_exact_match`` and the others of the
            setting ``metrics`` (``kit.scoring.metrics.Metric.results``): of a conversation only the last answer is
            generated, of a pair the chosen answer is expected. For preferences
            ``eval_loss`` is the objective's, there is no perplexity, and all metrics of a step are there, each with
            ``eval_`` before its name. Of prompts alone there is no loss, but ``eval_reward``.
        answers: the first ``NUM_SHOWN`` answers, if answers were generated.
        counts: of the answers, if they were generated, the same on every rank: ``num_answers``;
            ``num_truncated_answers``, whose reference fits into ``max_new_tokens``, all that were cut off with tools or
            without references;
            ``num_samples_without_prompt``, if there are some.
        stops: the special tokens that end references; EOS only if there is no other.
        intervals: of each metric of the answers, its bounds (``Metric.bounds``). Of the main process only: they take
            a thousand passes over all answers.
        details: for the report on classifiers: ``confusions``.
        odd_samples: origins of the samples in micro-batches whose losses are NaN/Inf, ``eval.jsonl:17``.
    """

    metrics: dict[str, float]
    answers: list[Answer] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    stops: list[str] = field(default_factory=list)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    odd_samples: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def doubts(self) -> list[str]:
        """Return a line if losses are not finite; else nothing."""
        if not self.odd_samples:
            return []
        found = f"eval_loss is {self.metrics['eval_loss']}: NaN/Inf in the micro-batches of {by_file(self.odd_samples)}"
        return [f"{found}; it cannot be the best evaluation, and early stopping ignores it"]
