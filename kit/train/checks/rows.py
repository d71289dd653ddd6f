"""What the checks before the first step share: rows for them, and a model that computes and stays as it was."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kit.data.feed.batches import Collator, MicroBatch
from kit.data.samples.records import Table
from kit.strategy.gradients import accumulating, drop_gradients
from kit.strategy.weights import reshard

if TYPE_CHECKING:
    from kit.data.chat.tokens import MediaCodec
    from kit.data.media import Media
    from kit.strategy.accelerator import Prepared


class Rows(Table):
    """Samples in memory: ids [T] and weights [T] of each, and its media."""

    def __init__(
        self,
        samples: Sequence[tuple[np.ndarray, np.ndarray]],
        media: "Sequence[Sequence[Media]]" = (),
        codec: "MediaCodec | None" = None,
    ) -> None:
        self._samples, self._media, self.media_codec = samples, media, codec
        lengths = np.array([len(ids) for ids, _ in samples], np.int32)
        columns = dict.fromkeys(("length", "num_targets", "target_weight"), lengths)
        super().__init__(columns, np.zeros(len(samples), np.int16))

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self._samples[i]

    def media_with_origin(self, i: int) -> "list[tuple[Media, str, str]]":
        """See ``Table``."""
        return [(each, "", "media") for each in self._media[i]]

    def micro_batch(self, *items: Sequence[int], packing: bool = False) -> MicroBatch:
        """Return a micro-batch of ``items``, each the numbers of samples. One row has no padding."""
        longest = int(self.lengths.sum()) if len(items) > 1 else 0
        return Collator(len(items), 0, packing, longest).collate(self, list(map(np.array, items)))


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """In the ``with`` block, let a model be in evaluation mode. Afterwards it is as it was, and sharded again."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        reshard(model)


def with_gradients(
    prepared: "Prepared", compute: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return losses of a model in evaluation mode, and the gradients of their sum by its input embeddings.

    Returns:
        Losses, float32, and gradients [B, T, h]: usually one, of the embeddings that this rank has.
    """
    accelerator, model = prepared.accelerator, prepared.model
    plain: Any = accelerator.unwrap_model(model)
    arriving: list[torch.Tensor] = []

    def watch(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
        output.requires_grad_().register_hook(arriving.append)
        return output.clone()  # which the model may change in place

    handle = plain.get_input_embeddings().register_forward_hook(watch)
    try:
        with evaluating(model), accumulating(accelerator, model, is_last=False):
            losses = compute()
            accelerator.backward(losses.sum())
    finally:
        handle.remove()
        drop_gradients(model)
    return losses.detach().float(), arriving
