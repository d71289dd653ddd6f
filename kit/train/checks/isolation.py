"""Check on the prepared model, before the first step, that the samples of a pack do not influence each other."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from kit.system.errors import UserError
from kit.train.checks.rows import Rows, evaluating, with_gradients

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
        media: of data with images or audio: then each of the two samples has one in its middle.

    Raises:
        UserError: ``packing`` cannot be used with this model.
    """
    rng = np.random.default_rng(0)
    samples: list[tuple[np.ndarray, np.ndarray]] = []
    of_samples: list[list[Media]] = []

    def draw(length: int, seed: int | None = None) -> None:
        """Add a sample of random tokens, with an image or a sound in it if there is a ``seed``."""
        ids, seen = rng.integers(vocab_size, size=length), []
        if media is not None:
            ids[np.isin(ids, [*media.added_ids])] = next(i for i in range(vocab_size) if i not in media.added_ids)
            if seed is not None:
                placeholders, example = media.example(seed)
                ids, seen = np.insert(ids, length // 2, placeholders), [example]
        samples.append((ids, np.full(len(ids), not samples)))  # losses of the first one
        of_samples.append(seen)

    for seed, length in enumerate((_LENGTH, _OTHER_LENGTH, _OTHER_LENGTH)):
        draw(length, seed)
    # Two samples, as no position may lie beyond the model's longest sample. They end at an odd place too.
    num_before = max(pack_length - len(samples[0][0]) - 1, 1) | 1
    draw(num_before - num_before // 2)
    draw(num_before // 2)
    rows = Rows(samples, of_samples, media)
    accelerator, model = prepared.accelerator, prepared.model

    def losses(*pack: int) -> torch.Tensor:
        """Those of the first sample, in a pack of some."""
        batch = rows.micro_batch([i for i in pack if rows.lengths[i]], packing=True)
        found: torch.Tensor = model(**batch.to(accelerator.device).model_inputs())
        return found

    def sends_gradient() -> bool:
        """Whether the loss of the sample has a gradient with respect to the embeddings of the other, before it."""
        passes = torch.zeros((), device=accelerator.device)
        for gradient in with_gradients(prepared, lambda: losses(1, 0))[1]:
            # Of the embeddings here, which may be those of a part of the row.
            end = max(0, int(rows.lengths[1]) - prepared.ranks.part * gradient.shape[1])
            passes += gradient[:, :end].any()
        return prepared.ranks.sum(passes).item() > 0

    try:
        with evaluating(model), torch.no_grad():
            after, first, at_end = losses(1, 0), losses(0, 1), losses(3, 4, 0)
            difference = (after - losses(2, 0)).abs().max().item()
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
    if found:
        found = f"packed samples influence each other in this model ({found})"
        raise UserError("packing", found, "the same losses whatever comes before", "--packing false")
