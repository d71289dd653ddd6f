"""Check on the prepared model, before the first step, that the samples of a pack do not influence each other."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kit.data.feed.batches import MicroBatch
from kit.errors import Problem, UserError
from kit.strategy.gradients import accumulating, drop_gradients

if TYPE_CHECKING:
    from kit.strategy.accelerator import Prepared


def check_isolation(prepared: "Prepared", vocab_size: int) -> None:
    """Raise ``UserError`` if the samples of a pack influence each other in this model. Called by all ranks.

    Two packs of two samples differ only in the first sample. Information passes between samples, by attention without
    bounds, a convolution or a recurrent state, if the losses of the second sample differ, or if they send a gradient to
    the embeddings of the first. That gradient is exactly zero otherwise, however small the influence would be.

    Args:
        vocab_size: rows of the model's embedding.

    Raises:
        UserError: ``packing`` cannot be used with this model.
    """
    length = 16
    tokens = np.random.default_rng(0).integers(vocab_size, size=(3, length))
    accelerator, model = prepared.accelerator, prepared.model

    def losses(first: np.ndarray) -> torch.Tensor:
        target_positions = torch.arange(length, 2 * length - 1)
        pack = MicroBatch(
            input_ids=torch.from_numpy(np.concatenate([first, tokens[2]]))[None],
            target_positions=target_positions,
            targets=torch.from_numpy(tokens[2, 1:]),
            weights=torch.ones(len(target_positions)),
            dataset_ids=torch.zeros_like(target_positions),
            position_ids=torch.arange(length).repeat(2)[None],
            cu_seq_lens=torch.tensor([0, length, 2 * length], dtype=torch.int32),
            max_seq_len=length,
        )
        return model(**pack.to(accelerator.device).model_inputs())

    def sends_gradient() -> bool:
        """Whether the loss of the second sample has a gradient with respect to the first one's embeddings."""
        arriving: list[torch.Tensor] = []  # [1, 2 * length, h]

        def watch(module: Any, inputs: Any, output: torch.Tensor) -> None:
            output.requires_grad_().register_hook(arriving.append)

        handle = accelerator.unwrap_model(model).get_input_embeddings().register_forward_hook(watch)
        try:
            with accumulating(accelerator, model, is_last=False):
                accelerator.backward(losses(tokens[0]).sum())
        finally:
            handle.remove()
            drop_gradients(model)
        return any(gradient[:, :length].any().item() for gradient in arriving)

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            difference = (losses(tokens[0]) - losses(tokens[1])).abs().max().item()
        # Equal shapes give equal bits. Experts (MoE) are an exception: the shape of their input depends on the routing.
        differs = not difference < (1e-4 if accelerator.mixed_precision == "no" else 2e-2)
        found = f"losses differ by {difference:.2g}" if differs else "a gradient passes" if sends_gradient() else ""
    except (ValueError, TypeError, AttributeError) as error:
        found = f"this model takes no packs ({str(error).splitlines()[0]})"
        raise UserError(Problem("packing", found, fix="do without packing")) from None
    model.train(was_training)
    if found:
        found = f"samples of a pack see each other in this model ({found})"
        raise UserError(Problem("packing", found, "the same losses whatever comes before", "do without packing"))
