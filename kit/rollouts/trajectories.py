"""Trajectories: the prompts and completions of a rollout as training samples.

Promise: the sampled token ids are trained on, never text that was tokenised again.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import gather_object

from kit.data.feed.batches import Collator, MicroBatch, on_device
from kit.data.feed.data_ranks import Ranks
from kit.data.feed.packing import pack
from kit.data.media import Media
from kit.data.samples.records import Table
from kit.data.samples.samples import Samples
from kit.train.reference import without_gradients

if TYPE_CHECKING:
    from kit.strategy.accelerator import Prepared


NUM_MEASURED = 16  # trajectories of a rollout of which something is measured in a pass of its own


Outcome = Literal["", "ended", "max_new_tokens", "max_turns", "max_length", "failed"]


class Segment(NamedTuple):
    """Tokens of a prompt, or an action: tokens that the policy generated."""

    ids: list[int]
    weight: float  # of each in the loss: 0 in a prompt, 1 in an action; its own in an answer of the data


@dataclass
class Trajectory:
    """The tokens of a prompt, and of turns with what the environment replied; with their reward and advantage."""

    key: tuple[int, int, int]  # the rollout, the prompt's sample, and the number of the completion
    segments: list[Segment]
    # ended: with a stop token, or an answer of the data. Else it was truncated: at max_new_tokens of a turn,
    # max_turns or max_length. failed: before its first turn. Empty: another turn follows.
    outcome: Outcome = ""
    rewards: list[float | str] = field(default_factory=list)  # for one that failed, the reason
    reward: float = np.nan  # their weighted sum; NaN if one failed
    advantage: float = 0.0
    logps: dict[str, list[float]] = field(default_factory=dict)  # of all actions, by old_, engine_ and reference_logps
    counts: dict[str, int] = field(default_factory=dict)  # by the name of the metric that has their mean

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Trajectory":
        """Return the one whose ``state`` this is."""
        segments = [Segment(*each) for each in state["segments"]]
        return cls(**{**state, "key": tuple(state["key"]), "segments": segments})

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it. None of its rewards has failed."""
        return asdict(self)

    @property
    def ended(self) -> bool:
        """Whether nothing cut it off."""
        return self.outcome == "ended"

    @property
    def sample(self) -> int:
        """The index of the prompt's sample."""
        return self.key[1]

    @property
    def ids(self) -> list[int]:
        """Its tokens, T of them."""
        return list(chain.from_iterable(ids for ids, _ in self.segments))

    @property
    def weights(self) -> np.ndarray:
        """The weight of each token in the loss, float32 [T]."""
        return np.concatenate([np.full(len(ids), weight, np.float32) for ids, weight in self.segments])

    @property
    def kl(self) -> float:
        """The log-ratio of its actions, log old - log reference; 0 if it has none."""
        return float(np.sum(self.logps.get("old_logps", [])) - np.sum(self.logps.get("reference_logps", [])))

    @property
    def num_written(self) -> int:
        """The tokens of its actions."""
        return sum(len(ids) for ids, weight in self.segments if weight)


def few_of(trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    """Return up to ``NUM_MEASURED`` of them."""
    return trajectories[:: -(-len(trajectories) // NUM_MEASURED)]


def tempered_losses(temperature: float) -> Callable[..., torch.Tensor] | None:
    """Return the ``StepLoss.target_values`` that divides logits by the temperature; None for 1."""

    def losses(micro_batch: MicroBatch, logits: torch.Tensor, rows: Any) -> torch.Tensor:
        return F.cross_entropy(logits / temperature, micro_batch.targets[rows], reduction="none")

    return None if temperature == 1 else losses


class Trajectories(Table):
    """Trajectories as samples."""

    def __init__(self, trajectories: Sequence[Trajectory], prompts: Samples, masks_truncated: bool = False) -> None:
        """
        Args:
            prompts: the samples whose prompts they complete.
            masks_truncated: no loss on a trajectory that did not end.
        """
        self._trajectories, self._prompts, self.media_codec = trajectories, prompts, prompts.media_codec
        self._weights = [each.weights * (each.ended or not masks_truncated) for each in trajectories]
        records: dict[str, np.ndarray] = {
            "length": np.array([len(each) for each in self._weights], np.int32),
            "num_targets": np.array([(each[1:] > 0).sum() for each in self._weights], np.int32),
            "target_weight": np.array([each[1:].sum(dtype=np.float64) for each in self._weights]),
        }
        super().__init__(records, prompts.dataset_ids[[each.sample for each in trajectories]])
        self.attach("advantages", np.array([[each.advantage] for each in trajectories], np.float64), per="sequence")
        for name in trajectories[0].logps:
            values = [np.array(each.logps[name], np.float32) for each in trajectories]
            # Those of one that is masked are not known, or of no use.
            self.attach(name, [each[:num] for each, num in zip(values, self.num_targets, strict=True)], per="token")

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self._trajectories[i].ids, np.int64), self._weights[i]

    def media_with_origin(self, i: int) -> list[tuple[Media, str, str]]:
        """See ``Table``."""
        return self._prompts.media_with_origin(self._trajectories[i].sample)

    def micro_batches(self, collator: Collator, ranks: Ranks) -> list[MicroBatch]:
        """Return this rank's micro-batches. The number of a sample is that of its trajectory."""
        items = list(np.arange(len(self))[:, None])
        if collator.packing:
            items = pack(self.lengths, collator.max_length).items()
        return collator.micro_batches(self, items, ranks)

    def compute_logps(
        self, prepared: "Prepared", collator: Collator, temperature: float = 1.0
    ) -> dict[int, list[float]]:
        """Return the log-probabilities of each trajectory's targets at a temperature. Called by all ranks."""
        losses = self.compute(prepared, collator, tempered_losses(temperature))
        return {i: np.negative(each).tolist() for i, each in losses.items()}

    def compute(
        self, prepared: "Prepared", collator: Collator, target_values: Callable[..., torch.Tensor] | None
    ) -> dict[int, list[float]]:
        """Return values of each trajectory's targets: see ``StepLoss.target_values``. Called by all ranks."""
        found = []
        with without_gradients(prepared):
            for micro_batch in on_device(self.micro_batches(collator, prepared.ranks), prepared.accelerator.device):
                assert micro_batch.sequence_ids is not None
                values = {} if target_values is None else {"target_values": partial(target_values, micro_batch)}
                losses = prepared.model(**micro_batch.model_inputs(), **values).float().cpu()
                sequence_ids = micro_batch.sequence_ids.cpu()
                for number, (_, _, i) in enumerate(micro_batch.segments):
                    found.append((i, losses[sequence_ids == number].tolist()))
        return dict(gather_object(found))
