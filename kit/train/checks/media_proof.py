"""Prove on the prepared model, before the first step, that rows with media are trained as by the model's own code."""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kit.data.chat.media_parts import MARKS
from kit.data.chat.tokens import encode_all
from kit.system.errors import UserError, first_line
from kit.train.checks.rows import Rows, with_gradients

if TYPE_CHECKING:
    from kit.data.chat.tokens import MediaCodec
    from kit.data.media import Media
    from kit.data.samples.rows import Encoder
    from kit.strategy.accelerator import Prepared

_ONE_ROW = "--per_device_train_batch_size 1 --per_device_eval_batch_size 1"
_FIX = "train on rows without them (of a stream: --streaming false), or a model of another family"


def prove_media(prepared: "Prepared", encoder: "Encoder", codec: "MediaCodec", packing: bool, pads: bool) -> None:
    """Compare losses and gradients of rows with and without media with the model's own forward. Called by all ranks.

    Each row alone goes through the model's own processor and its own forward with labels. As the kit makes it, alone,
    and in a padded micro-batch or a pack if the run has some, it must have the same loss, and the same gradients of the
    embeddings of its tokens. Weights, buffers and random state stay as they are.

    Args:
        codec: of the kinds of media that rows have.
        pads: whether a micro-batch of the run has several rows.

    Raises:
        UserError: they differ by more than rounding.
    """
    where = _where(codec)
    accelerator, model = prepared.accelerator, prepared.model
    plain: Any = accelerator.unwrap_model(model)
    name = type(plain.get_base_model() if hasattr(plain, "get_base_model") else plain).__name__

    def computed(inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses, [S] or [], and the gradient of their sum with respect to the embeddings, [B * T, h]."""

        def losses() -> torch.Tensor:
            found = model(**inputs)
            return found.loss * (inputs["labels"][:, 1:] != -100).sum() if "labels" in inputs else found

        found, gradients = with_gradients(prepared, losses)
        return found, torch.stack(gradients).sum(0).flatten(0, 1).float()

    # Relative. In bf16, rounding changes gradients more than losses; and less if shapes are those of the reference.
    exact, alone, rounded = (1e-5, 1e-4), (1e-2, 0.05), (2e-2, 0.2)
    try:
        media = [codec.example(seed)[1] for seed in range(1 + len(codec.tokens))]
        own, rows = _rows(encoder, codec, [[], *([each] for each in media[:-1]), media])
        if accelerator.num_processes > 1 and not rows.micro_batch([0]).dummy_inputs:
            found = f"given, but {name} has no get_image_features, by which ranks without one run the encoder"
            raise UserError(where, found, fix="train on one process")
        references = [
            computed({"use_cache": False} | {key: value.to(accelerator.device) for key, value in inputs.items()})
            for inputs in own
        ]
        singles = [[i] for i in range(len(rows))]
        layouts = {"a row": [[each] for each in singles]}
        layouts |= {"padded rows": [singles]} if pads else {}
        layouts |= {"a pack": [[[*range(len(rows))]]]} if packing else {}
        for layout, micro_batches in layouts.items():
            of_losses = of_gradients = 0.0
            for items in micro_batches:
                batch = rows.micro_batch(*items, packing=layout == "a pack").to(accelerator.device)
                losses, gradient = computed(batch.model_inputs())
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
                fix = {"a pack": "--packing false", "padded rows": _ONE_ROW}.get(layout, _FIX)
                raise UserError(where, f"{differences}, from those of {name} itself", expected, fix)
    except UserError:
        raise
    except Exception as error:  # the code of any family
        raise UserError(where, f"given, but {name} fails on small ones ({first_line(error)})", fix=_FIX) from None


def _rows(
    encoder: "Encoder", codec: "MediaCodec", media: "Sequence[Sequence[Media]]"
) -> tuple[list[dict[str, Any]], Rows]:
    """Conversations with media: as the model's own processor makes them of a text, with labels; and as training does.

    Raises ``UserError`` if the ids differ.
    """
    arounds: list[Sequence[str]] = []

    def texts(of_row: "Sequence[Media]", around: Sequence[str] = ()) -> list[str]:
        arounds.append(around)
        return codec.texts(of_row, around)

    where = _where(codec)
    recorder: Any = copy(codec)
    recorder.texts = texts
    own: list[dict[str, Any]] = []
    samples: list[tuple[np.ndarray, np.ndarray]] = []
    for of_row in media:
        asked = "".join(f"{MARKS[each.kind]} and " for each in of_row) + "what is it?"
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": "Four cups of tea."}]
        sample = {"messages": messages, "media": of_row}
        (found,) = encode_all([sample], encoder.tokenizer, encoder.template, "assistant", recorder)
        if not isinstance(found, list):
            raise UserError(found)
        ids, weights = np.array(found[0].input_ids), np.array(found[0].weights, np.float32)
        tokens = [*(codec.tokens[each.kind] for each in of_row), ""]
        inputs = codec.own_inputs("".join(map("".join, zip(arounds[-1], tokens, strict=True))), of_row)
        if inputs["input_ids"][0].tolist() != ids.tolist():
            found_tokens = (
                f"given, but the model's processor makes {inputs['input_ids'].shape[1]} tokens of a conversation"
            )
            raise UserError(where, found_tokens, f"the {len(ids)} of its chat template", _FIX)
        if any(id_ in codec.placeholder_ids for id_ in ids[weights > 0].tolist()):
            raise UserError(where, "given, but the model would learn to write their placeholders", fix=_FIX)
        own.append({**inputs, "labels": torch.from_numpy(np.where(weights > 0, ids, -100))[None]})
        samples.append((ids, weights))
    return own, Rows(samples, media, codec)


def _where(codec: "MediaCodec") -> str:
    return "images" if "image" in codec.tokens else "audio"
