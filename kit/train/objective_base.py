"""What most objectives have in common."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from kit.config.settings.objective import ObjectiveSettings

if TYPE_CHECKING:
    from kit.data.feed.batches import MicroBatch
    from kit.data.feed.feed import GlobalBatch
    from kit.strategy.accelerator import Prepared


@dataclass(frozen=True)
class ObjectiveBase:
    """An objective over the cross-entropy of each target, without a pass before the step.

    See ``kit.train.objective.Objective``.
    """

    target_values: ClassVar[Callable[..., torch.Tensor] | None] = None
    dataset_names: Sequence[str]
    settings: ObjectiveSettings = field(default_factory=ObjectiveSettings)

    def begin_step(self, prepared: "Prepared", batch: "GlobalBatch") -> "GlobalBatch":
        """Return ``batch``, which has all that is needed."""
        return batch

    def estimate_kl(
        self, prepared: "Prepared", mismatched: Iterable["MicroBatch"], num_samples: int
    ) -> torch.Tensor | None:
        """Return None: there is none."""
        return None
