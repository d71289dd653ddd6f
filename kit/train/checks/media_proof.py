"""Prove on the prepared model, before the first step, that rows with media are trained as by the model's own code."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kit.data.chat.media_parts import MARKS
from kit.data.chat.tokens import encode_all
from kit.data.feed.batches import Collator
from kit.data.samples.records import Table
from kit.strategy.gradients import accumulating, drop_gradients
from kit.system.errors import UserError, first_line

if TYPE_CHECKING:
    from kit.data.chat.tokens import Encoded, MediaCodec
    from kit.data.media import Media
    from kit.data.samples.rows import Encoder
    from kit.strategy.accelerator import Prepared

_FIX = "train on rows without them (of a stream: --streaming false), or a model of another family"


def prove_media(prepared: "Prepared", encoder: "Encoder", packing: bool) -> None:
    """Compare losses and gradients of rows with and without media with the model's own forward. Called by all ranks.

    Each row alone goes through the model's own processor and its own forward with labels. As the kit makes it, alone,
    in a padded micro-batch, and in a pack if the run packs, it must have the same loss, and the same gradients of the
    embeddings of its tokens. Weights, buffers and random state stay as they are.

    Args:
        encoder: of rows with media.

    Raises:
        UserError: they differ by more than rounding.
    """
    assert encoder.media
    codec = encoder.media.only({"image"})
    accelerator, model = prepared.accelerator, prepared.model
    plain: Any = accelerator.unwrap_model(model)
    name = type(plain.get_base_model() if hasattr(plain, "get_base_model") else plain).__name__

    def computed(inputs: dict[str, Any], own: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses, [S] or [], and the gradient of their sum with respect to the embeddings, [B * T, h]."""
        arriving: list[torch.Tensor] = []

        def watch(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
            output.requires_grad_().register_hook(arriving.append)
            return output.clone()  # which the model may change in place

        handle = plain.get_input_embeddings().register_forward_hook(watch)
        try:
            with accumulating(accelerator, model, is_last=False):
                losses = model(**inputs)
                if own:
                    losses = losses.loss * (inputs["labels"][:, 1:] != -100).sum()
                accelerator.backward(losses.sum())
        finally:
            handle.remove()
            drop_gradients(model)
        return losses.detach().float(), torch.stack(arriving).sum(0).flatten(0, 1).float()

    # Relative. In bf16, rounding changes gradients more than losses; and less if shapes are those of the reference.
    exact, alone, rounded = (1e-5, 1e-4), (1e-2, 0.05), (2e-2, 0.2)
    was_training = model.training
    model.eval()
    try:
        media = [codec.example(seed, 1 + seed % 2)[1] for seed in range(3)]
        rows = _Rows(replace(encoder, media=codec), [media[:1], [], media[1:]])
        if accelerator.num_processes > 1 and not Collator(1, 0, False, 1).collate(rows, [np.array([1])]).dummy_inputs:
            found = f"given, but {name} has no get_image_features, by which ranks without one run the encoder"
            raise UserError("images", found, fix="train on one process")
        references = []
        for i in range(len(rows)):
            inputs = {key: value.to(accelerator.device) for key, value in rows.own_inputs(i).items()}
            references.append(computed({**inputs, "use_cache": False}, own=True))
        singles = np.arange(len(rows))[:, None]  # the samples of each item
        layouts = {"a row": [[each] for each in singles], "padded rows": [list(singles)]}
        layouts |= {"a pack": [[singles[:, 0]]]} if packing else {}
        for layout, micro_batches in layouts.items():
            of_losses = of_gradients = 0.0
            for items in micro_batches:
                longest = int(rows.lengths[items[0]].max() if layout == "a row" else rows.lengths.sum())
                batch = Collator(len(items), 0, layout == "a pack", longest).collate(rows, items)
                losses, gradient = computed(batch.to(accelerator.device).model_inputs(), own=False)
                for k, (start, size, i) in enumerate(batch.segments):
                    own_loss, own_gradient = references[i]
                    loss, of_row = losses[batch.sequence_ids == k].sum(), gradient[start : start + size]
                    of_losses = max(of_losses, float((loss - own_loss).abs() / own_loss.abs()))
                    of_gradients = max(of_gradients, float((of_row - own_gradient).norm() / own_gradient.norm()))
            bounds = exact if prepared.computes_in_float32 else alone if layout == "a row" else rounded
            fits = of_losses < bounds[0] and of_gradients < bounds[1]
            if prepared.ranks.sum(torch.tensor(float(not fits), device=accelerator.device)).item():
                differences = f"losses of {layout} differ by {of_losses:.2g}, and gradients by {of_gradients:.2g}"
                expected = f"at most {bounds[0]:g} and {bounds[1]:g}"
                fix = "--packing false" if layout == "a pack" else _FIX
                raise UserError("images", f"{differences}, from those of {name} itself", expected, fix)
    except UserError:
        raise
    except Exception as error:  # the code of any family
        raise UserError("images", f"given, but {name} fails on small ones ({first_line(error)})", fix=_FIX) from None
    finally:
        model.train(was_training)


class _Rows(Table):
    """Conversations with media, as training would have them, and as the model's own processor makes them of a text."""

    def __init__(self, encoder: "Encoder", media: "Sequence[Sequence[Media]]") -> None:
        assert encoder.media
        self.media_codec: MediaCodec = encoder.media
        self._media = media
        self._recorder: Any = _Recorder(encoder.media)
        self._encoded: list[Encoded] = []
        for of_row in media:
            asked = "".join(f"{MARKS[each.kind]} and " for each in of_row) + "what is it?"
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": "Four cups of tea."}]
            sample = {"messages": messages, "media": of_row}
            (found,) = encode_all([sample], encoder.tokenizer, encoder.template, "assistant", self._recorder)
            if not isinstance(found, list):
                raise UserError(found)
            self._encoded += found
        weights = [np.array(each.weights[1:]) for each in self._encoded]
        columns: dict[str, np.ndarray] = {
            "length": np.array([len(each.input_ids) for each in self._encoded], np.int32),
            "num_targets": np.array(list(map(np.count_nonzero, weights)), np.int32),
            "target_weight": np.array(list(map(np.sum, weights)), np.float64),
        }
        super().__init__(columns, np.zeros(len(media), np.int16))

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self._encoded[i].input_ids), np.array(self._encoded[i].weights, np.float32)

    def media_with_origin(self, i: int) -> "list[tuple[Media, str, str]]":
        """See ``Table``."""
        return [(each, "", "images") for each in self._media[i]]

    def own_inputs(self, i: int) -> dict[str, Any]:
        """Return what the model's processor makes of row ``i``, and labels. Raises ``UserError`` if the ids differ."""
        tokens = [self.media_codec.tokens[each.kind] for each in self._media[i]]
        text = "".join(piece + token for piece, token in zip(self._recorder.around[i], [*tokens, ""], strict=True))
        inputs = self.media_codec.own_inputs(text, self._media[i])
        ids, weights = self[i]
        if inputs["input_ids"][0].tolist() != ids.tolist():
            found = f"given, but the model's processor makes {inputs['input_ids'].shape[1]} tokens of a conversation"
            raise UserError("images", found, f"the {len(ids)} of its chat template", _FIX)
        if any(id_ in self.media_codec.placeholder_ids for id_ in ids[weights > 0].tolist()):
            raise UserError("images", "given, but the model would learn to write their placeholders", fix=_FIX)
        labels = torch.from_numpy(np.where(weights > 0, ids, -100))[None]
        return {**inputs, "labels": labels}


class _Recorder:
    """A ``MediaCodec`` that keeps the texts around the media of each row."""

    def __init__(self, codec: "MediaCodec") -> None:
        self._codec = codec
        self.around: list[Sequence[str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def texts(self, media: "Sequence[Media]", around: Sequence[str] = ()) -> list[str]:
        """See ``MediaCodec``."""
        self.around.append(around)
        return self._codec.texts(media, around)
