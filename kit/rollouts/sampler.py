"""Samplers, which generate the completions of a rollout: the policy itself, or a vLLM server."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kit.data.chat.tokens import MediaCodec
from kit.model.layers.attention import without_cudnn_attention
from kit.model.sampling import Sampling
from kit.rollouts.generation import Completion, Request, generate_answers
from kit.strategy.weights import generating
from kit.system.console import Progress
from kit.train.reference import without_gradients

if TYPE_CHECKING:
    from kit.config.recipe import Recipe
    from kit.config.settings.objective import ObjectiveSettings
    from kit.strategy.accelerator import Prepared


class Sampler(Protocol):
    """Generates completions. All ranks make the same calls."""

    published: str  # the name of the weights that it was given; empty: it uses the policy's

    def publish(self, step: int) -> None:
        """Give it the weights after ``step`` steps."""

    def sample(self, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        """Yield this rank's completions, each with its index in ``requests``: those that it owns.

        Args:
            requests: the same on all ranks.
        """


@dataclass
class OwnModel:
    """The policy itself, by transformers' ``generate``."""

    prepared: "Prepared"
    recipe: "Recipe"
    sampling: Sampling
    stops: Collection[int]
    pad_token_id: int
    media_codec: MediaCodec | None
    progress: Progress
    published: str = ""

    def publish(self, step: int) -> None:
        """Do nothing: the weights are the same."""

    def sample(self, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        """See ``Sampler``."""
        accelerator, model, ranks = self.prepared.accelerator, self.prepared.model, self.prepared.processes
        recipe = self.recipe
        mine = [place for place, request in enumerate(requests) if request.owner == ranks.index]
        mine.sort(key=lambda place: len(requests[place].ids))  # a call has little padding
        size = recipe.eval_batch_size
        most = max(Counter(request.owner for request in requests).values(), default=0)
        num_calls = -(-most // size)
        with without_gradients(self.prepared), without_cudnn_attention(), generating(accelerator, model) as generate:
            if self.media_codec:  # a placeholder in a completion would have no image feature
                generate = partial(generate, suppress_tokens=sorted(self.media_codec.placeholder_ids))
            for call in self.progress(range(num_calls), "rollout", num_calls):
                places = mine[call * size : (call + 1) * size]
                completions = generate_answers(
                    generate,
                    # A rank without a request left generates for the first one, and nobody reads that.
                    [requests[place] for place in places or [0]],
                    stops=self.stops,
                    pad_token_id=self.pad_token_id,
                    sampling=self.sampling,
                    seed=recipe.seed,
                    device=accelerator.device,
                    media_codec=self.media_codec,
                )
                yield from zip(places, completions, strict=False)


def sampling_of(settings: "ObjectiveSettings") -> Sampling:
    """Return how completions of rollouts are sampled."""
    of_rollouts = settings.rollout_temperature, settings.rollout_top_p, settings.rollout_top_k, settings.rollout_min_p
    return Sampling(*of_rollouts)
