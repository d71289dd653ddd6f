"""Engines: what writes the answers of a rollout, the model itself or a vLLM server."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kit.data.open import prompt_and_reference
from kit.data.samples.samples import Samples
from kit.model.layers.attention import without_cudnn_attention
from kit.strategy.weights import generating
from kit.train.reference import without_gradients
from kit.train.rollouts.generation import Completion, generate_answers

if TYPE_CHECKING:
    from kit.config.recipe import Recipe
    from kit.strategy.accelerator import Prepared


class Engine(Protocol):
    """Writes answers. All ranks make the same calls."""

    published: str  # the name of the weights that it was given; empty: it uses those that train

    def publish(self, step: int) -> None:
        """Give it the weights after ``step`` steps."""

    def answering(
        self, number: int, tasks: Sequence[tuple[int, int]]
    ) -> AbstractContextManager[Callable[[Sequence[int]], list[Completion]]]:
        """In the ``with`` block, answer prompts: it yields a function of places in ``tasks``.

        Args:
            number: of the batch of prompts.
            tasks: samples, and numbers of answers to each; the same on all ranks. All answers to a sample are in it.
        """


class OwnEngine:
    """The model that trains, by transformers' ``generate``."""

    published = ""

    def __init__(
        self,
        prepared: "Prepared",
        recipe: "Recipe",
        prompts: Samples,
        stops: Collection[int],
        pad_token_id: int,
    ) -> None:
        self._prepared, self._recipe, self._prompts = prepared, recipe, prompts
        self._stops, self._pad_token_id = stops, pad_token_id

    def publish(self, step: int) -> None:
        """Do nothing: the weights are the same."""

    @contextmanager
    def answering(
        self, number: int, tasks: Sequence[tuple[int, int]]
    ) -> Iterator[Callable[[Sequence[int]], list[Completion]]]:
        """See ``Engine``. All ranks call the function the same number of times, each with places of its own."""
        accelerator, model = self._prepared.accelerator, self._prepared.model
        with without_gradients(self._prepared), without_cudnn_attention(), generating(accelerator, model) as generate:
            if maker := self._prompts.image_maker:  # a placeholder in an answer would be one without a feature
                generate = partial(generate, suppress_tokens=[maker.placeholder_id])
            yield lambda places: generate_answers(
                generate,
                [prompt_and_reference(self._prompts, tasks[place][0])[0] for place in places],
                stops=self._stops,
                pad_token_id=self._pad_token_id,
                max_new_tokens=self._recipe.max_new_tokens,
                temperature=1.0,
                top_p=None,
                seed=self._recipe.seed,
                numbers=[(number, *tasks[place]) for place in places],
                device=accelerator.device,
                more_inputs=partial(self._prompts.generation_inputs, numbers=[tasks[place][0] for place in places]),
            )
