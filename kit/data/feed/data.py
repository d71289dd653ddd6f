"""The data of a run: samples to train on in their order, samples to evaluate on, and how rows are encoded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kit.config.settings.data import DataSettings
from kit.config.settings.optimisation import OptimSettings
from kit.data.chat.template import Jinja
from kit.data.chat.tokens import MediaCodec, form_of
from kit.data.feed.data_ranks import Ranks
from kit.data.feed.feed import BatchSource, Feed
from kit.data.feed.mismatched import Mismatched
from kit.data.feed.order import Order
from kit.data.samples.dataset import Dataset
from kit.data.samples.rows import Encoder
from kit.data.samples.samples import Samples, Store
from kit.system.cache import digest


@dataclass(frozen=True)
class Data:
    """The data of a run, tokenised and in the cache, or a ``kit.data.stream.stream.Stream``."""

    settings: DataSettings
    seed: int
    datasets: Sequence[Dataset]  # to train on
    encoder: Encoder
    evaluation: Samples | None = None
    notes: tuple[str, ...] = ()  # lines for the user
    # Not of a stream: recipes that stream are refused wherever these are read.
    train: Samples = None  # type: ignore[assignment]
    order: Order = None  # type: ignore[assignment]
    steps_per_batch: int = 1  # on one batch of ``order``

    @property
    def chat_template(self) -> Jinja:
        """The template to be saved with the model."""
        return self.encoder.template

    @property
    def text_form(self) -> str:
        """The form of the texts to train on, see ``FORMS``."""
        return form_of(*(store.info["counts"] for store in self.looked_at.stores))

    @property
    def fingerprint(self) -> str:
        """Identifies the training data. Evaluation data are not in it: a run may continue with other ones."""
        return digest(self.train.fingerprint, self.order.quotas) if self.order.quotas else self.train.fingerprint

    @property
    def dataset_names(self) -> list[str]:
        """The names of the training datasets."""
        return [dataset.entry.name for dataset in self.datasets]

    @property
    def looked_at(self) -> Samples:
        """Samples to train on: all, or the first ones of each dataset of a stream."""
        return self.train

    @property
    def media(self) -> MediaCodec | None:
        """See ``Samples.media_codec``."""
        return self.train.media_codec

    def whole_epochs_after(self, num_steps: int) -> int:
        """Return how many epochs the first ``num_steps`` steps complete."""
        return self.order.whole_epochs_after(num_steps // self.steps_per_batch)

    def total_steps(self, settings: OptimSettings) -> int:
        """Return the optimiser steps of the whole run: ``max_steps``, or those of ``num_train_epochs`` rounded up."""
        return settings.max_steps or self.order.total_steps(settings.num_train_epochs) * self.steps_per_batch

    def skipped_rows(self) -> list[dict[str, Any]]:
        """Return the rows that were left out because they cannot be used, with what is wrong with each."""
        return [row for store in self._stores() for row in store.skipped]

    def open_feed(
        self,
        settings: OptimSettings,
        ranks: Ranks,
        pad_token_id: int,
        state: Mapping[str, Any],
        output_dir: str | None = None,
    ) -> BatchSource:
        """Open the global batches of the run.

        Args:
            state: where a stream begins, as its ``BatchSource.state`` returned it; empty at the beginning of a run.
                Else the number of a step determines its samples.
            output_dir: where a stream lists the rows that it skips; None: the current folder.

        Raises:
            UserError: ``state`` does not belong to this stream.
        """
        num_steps = self.total_steps(settings)
        return Feed(
            self.train,
            self.order,
            self.settings,
            settings.micro_batch_size,
            ranks,
            pad_token_id,
            num_steps,
            self.mismatched(self.train),
        )

    def mismatched(self, samples: Samples) -> Mismatched | None:
        """Return the answers to other prompts that belong to ``samples``; None unless their kind has some."""
        return Mismatched(samples, self.seed, self.settings.max_length) if samples.kind.has_mismatched else None

    def describe(self) -> dict[str, Any]:
        """Return what ``run.json`` records of the data."""
        return {
            "fingerprint": self.fingerprint,
            "train": self.train.report,
            "evaluation": self.evaluation.report if self.evaluation else None,
            "sources": [store.report for store in self._stores()],
        }

    def _stores(self) -> list[Store]:
        """The stores of the training and the evaluation data, each once."""
        every = [self.train] if self.evaluation is None else [self.train, self.evaluation]
        # What is held out has the stores of the training data.
        return list({id(store): store for samples in every for store in samples.stores}.values())
