"""Online distillation: the teacher runs next to the student.

Logits of a whole row are never held. The teacher computes the hidden states of the targets before the step; its logits
and the student's are computed a chunk at a time.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from kit.config.recipe import Recipe
from kit.data.feed.batches import MicroBatch, on_device
from kit.data.feed.feed import GlobalBatch
from kit.model.build import build_teacher, open_config
from kit.model.teacher import naming_teacher, teacher_settings
from kit.run.run import Run
from kit.strategy.accelerator import Prepared, prepare
from kit.strategy.processes.rendezvous import together
from kit.strategy.weights import reshard, whole_tensor
from kit.train.reference import without_gradients

_STATES = "teacher_states"  # of ``MicroBatch.per_target``: [S, h]


class Teacher:
    """A frozen model and its head, which every rank holds whole."""

    def __init__(self, prepared: Prepared) -> None:
        """``prepared``: a model of ``build_teacher``. Called by all ranks."""
        model: Any = prepared.accelerator.unwrap_model(prepared.model)
        head = model.get_output_embeddings()
        self.prepared = prepared
        self._weight = whole_tensor(head.weight).to(prepared.accelerator.device)  # [V, h]
        self._bias = None if head.bias is None else whole_tensor(head.bias).to(prepared.accelerator.device)
        self._transform: Callable[[torch.Tensor], torch.Tensor] = model.transform_logits
        self.description = f"teacher: {type(model).__name__} with {model.num_parameters():,} parameters"

    @property
    def vocab_size(self) -> int:
        """Rows of its head."""
        return len(self._weight)

    def states(self, batch: GlobalBatch) -> GlobalBatch:
        """Return the batch with the hidden states that predict each target. Called by all ranks."""
        with without_gradients(self.prepared):
            on_its_device = on_device(batch.micro_batches, self.prepared.accelerator.device)
            known = [self.with_states(micro_batch) for micro_batch in on_its_device]
        reshard(self.prepared.model)  # its head would stay unsharded
        return replace(batch, micro_batches=known)

    def with_states(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch of its device with these states."""
        states = self.prepared.model(**micro_batch.model_inputs()).to(self._weight.dtype)
        return replace(micro_batch, per_target={**micro_batch.per_target, _STATES: states})

    def logits(self, micro_batch: MicroBatch, rows: slice) -> torch.Tensor:
        """Return the logits of a slice of the targets, float32 [C, V]."""
        with torch.no_grad():
            return self._transform(F.linear(micro_batch.per_target[_STATES][rows], self._weight, self._bias).float())

    def compare(
        self, micro_batch: MicroBatch, logits: torch.Tensor, rows: slice, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the log-probabilities of the teacher and the student for some targets.

        Args:
            logits: the student's, float32 [C, V].

        Returns:
            The log-probabilities of the same outcomes by both, teacher first, float32 [C, W]; and whether both have the
            same most probable token, bool [C].
        """
        own = self.logits(micro_batch, rows)
        # Tables may be padded to different sizes. The rest is no token of either.
        size = min(logits.shape[1], own.shape[1])
        p, q = ((each[:, :size] / temperature).log_softmax(dim=-1) for each in (own, logits))
        return p, q, p.argmax(dim=-1) == q.argmax(dim=-1)


def open_teacher(run: Run, recipe: Recipe) -> Teacher:
    """Load the teacher that a recipe names. Called by all ranks. Raises ``UserError`` as ``build_teacher``."""
    settings = teacher_settings(recipe)
    with together(run.accelerator), naming_teacher():
        frozen = build_teacher(settings, open_config(settings), run.load_plan, recipe.packing)
    return Teacher(prepare(run.accelerator, run.topology, frozen))
