"""Check on the prepared model, before the first step, that the samples of a pack do not influence each other."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kit.data.feed.batches import MicroBatch
from kit.strategy.gradients import accumulating, drop_gradients
from kit.system.errors import UserError

if TYPE_CHECKING:
    from kit.data.chat.tokens import MediaCodec
    from kit.data.media import Media
    from kit.strategy.accelerator import Prepared


_LENGTH = 16  # tokens of the sample whose losses are compared
# Odd, so that the other sample moves this one across the bounds of all blocks of an even number of tokens.
_OTHER_LENGTH = 17


def check_isolation(prepared: "Prepared", vocab_size: int, pack_length: int, media: "MediaCodec | None" = None) -> None:
    """Raise ``UserError`` if the samples of a pack influence each other in this model. Called by all ranks.

    - A sample has the same losses, but for rounding, after another sample as before it, where only causality counts;
      and at the end of the longest pack. They differ if a layer knows a token by its place in the row.
    - They are the same whichever sample comes before. They differ if information passes between samples: by attention
      without bounds, a convolution or a recurrent state.
    - They send no gradient to the embeddings of the other sample. It is exactly zero, however small the influence would
      be.

    What shows in bf16 hardly, or not at the end of a pack, is known from the config:
    ``kit.model.layers.attention.longest_pack``.

    Args:
        vocab_size: rows of the model's embedding.
        pack_length: tokens of the longest pack: as many as a sample may have, or twice as many for both of a pair.
        media: of data with images: then each of the two samples has one in its middle.

    Raises:
        UserError: ``packing`` cannot be used with this model.
    """
    rng = np.random.default_rng(0)
    pictures: dict[int, Media] = {}  # by the ``id`` of their sample

    def drawn(length: int, seed: int | None = None) -> np.ndarray:
        """A sample of random tokens, with a picture in it if there is a ``seed``."""
        ids = rng.integers(vocab_size, size=length)
        if media is None:
            return ids
        ids[np.isin(ids, [*media.added_ids])] = next(i for i in range(vocab_size) if i not in media.added_ids)
        if seed is not None:
            placeholders, picture = media.example(seed)
            ids = np.insert(ids, length // 2, placeholders)
            pictures[id(ids)] = picture
        return ids

    sample = drawn(_LENGTH, 0)
    others = drawn(_OTHER_LENGTH, 1), drawn(_OTHER_LENGTH, 2)
    # Two samples, as no position may lie beyond the model's longest sample. They end at an odd place too.
    before_end = np.array_split(drawn(max(pack_length - len(sample) - 1, 1) | 1), 2)
    accelerator, model = prepared.accelerator, prepared.model

    def losses(*samples: np.ndarray) -> torch.Tensor:
        """Those of ``sample``, which is one of ``samples``, in a pack of them."""
        lengths = [len(each) for each in samples]
        start = sum(lengths[: next(i for i, each in enumerate(samples) if each is sample)])
        target_positions = torch.arange(start, start + len(sample) - 1)
        pack = MicroBatch(
            input_ids=torch.from_numpy(np.concatenate(samples))[None],
            target_positions=target_positions,
            targets=torch.from_numpy(sample[1:]),
            weights=torch.ones(len(target_positions)),
            dataset_ids=torch.zeros_like(target_positions),
            position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
            cu_seq_lens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
            segment_lengths=tuple(lengths),
        )
        if media is not None:
            segments = [
                (end - length, length, 0) for end, length in zip(np.cumsum(lengths).tolist(), lengths, strict=True)
            ]
            of_segments = [[(pictures[id(each)], "", "")] if id(each) in pictures else [] for each in samples]
            pack = replace(pack, **media.inputs(pack.input_ids.numpy(), segments, of_segments))
        return model(**pack.to(accelerator.device).model_inputs())

    def sends_gradient() -> bool:
        """Whether the loss of the sample has a gradient with respect to the embeddings of the other, before it."""
        arriving: list[torch.Tensor] = []  # [1, T, h]

        def watch(module: Any, inputs: Any, output: torch.Tensor) -> None:
            output.requires_grad_().register_hook(arriving.append)

        handle = accelerator.unwrap_model(model).get_input_embeddings().register_forward_hook(watch)
        try:
            with accumulating(accelerator, model, is_last=False):
                accelerator.backward(losses(others[0], sample).sum())
        finally:
            handle.remove()
            drop_gradients(model)
        passes = torch.zeros((), device=accelerator.device)
        for gradient in arriving:  # of the embeddings here, which may be those of a part of the row
            end = max(0, len(others[0]) - prepared.ranks.part * gradient.shape[1])
            passes += gradient[:, :end].any()
        return prepared.ranks.sum(passes).item() > 0

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            after = losses(others[0], sample)
            difference = (after - losses(others[1], sample)).abs().max().item()
            first = losses(sample, others[0])
            at_end = losses(*filter(len, before_end), sample)
            moved = torch.maximum((after - first).abs(), (at_end - first).abs())
        # Equal shapes give equal bits, except for experts, whose inputs depend on the routing. A sample that moves also
        # changes the order of sums in attention; in bf16 a token may then reach another expert, so the mean counts.
        in_float32 = prepared.computes_in_float32
        shift = (moved.max() if in_float32 else moved.mean()).item()
        size = max(1.0, after.max().item())
        if not difference < (1e-5 * size if in_float32 else 2e-2):
            found = f"losses differ by {difference:.2g}"
        elif not shift < (1e-5 if in_float32 else 2e-2) * size:
            found = f"losses after another sample and before it differ by {shift:.2g}"
        else:
            found = "a gradient passes" if sends_gradient() else ""
    except (ValueError, TypeError, AttributeError) as error:
        found = f"this model does not support packing ({str(error).splitlines()[0]})"
        raise UserError("packing", found, fix="--packing false") from None
    model.train(was_training)
    if found:
        found = f"packed samples influence each other in this model ({found})"
        raise UserError("packing", found, "the same losses whatever comes before", "--packing false")
