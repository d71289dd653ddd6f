"""The model that a command runs, ready on all ranks: to train, to score, or to generate."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.checkpoint.load import load_weights
from kit.config.recipe import Recipe
from kit.data.feed.data import Data
from kit.model.adapters.token_rows import num_rows
from kit.model.build import build_model
from kit.model.layers.compile import Compiler
from kit.model.summary import describe_parts
from kit.strategy.accelerator import Prepared, layer_classes, prepare
from kit.strategy.processes.rendezvous import together
from kit.system import phases
from kit.train.checks.causality import check_causality
from kit.train.checks.compilation import compile_first
from kit.train.checks.head_proof import prove_head
from kit.train.checks.isolation import check_isolation
from kit.train.checks.media_proof import prove_media
from kit.train.checks.replicas import describe_check
from kit.train.optim.optim import build_optimizer, keep_lr_multipliers
from kit.train.session import Session


@dataclass
class Policy(Prepared):
    """A model on all ranks, with what belongs to it.

    Attributes:
        tokenizer: with the chat template that is saved with the model.
        notes: lines for the user about its parts.
        compiler: what is compiled; None: nothing.
    """

    tokenizer: Any = None
    notes: list[str] = field(default_factory=list)
    compiler: Compiler | None = None

    def describe(self, recipe: Recipe) -> list[str]:
        """Return lines for the user before the first step."""
        about = self.strategy.describe(recipe, recipe)
        return [about, *self.notes, *describe_check(self, recipe.check_replicas)]


def build_policy(
    session: Session,
    recipe: Recipe,
    config: Any,
    tokenizer: Any,
    data: Data | None = None,
    weights: Path | None = None,
) -> Policy:
    """Load a model and wrap it for the ranks. Called by all ranks.

    Args:
        config: of the model, see ``kit.model.build.open_config``.
        data: to train on. Then the model gets its optimiser and compiled layers; and before anything is learned it is
            proven that the loss head gives the losses of the model's own logits, and that packed samples are apart.
            None: nothing will be trained.
        weights: a checkpoint whose weights are loaded.

    Raises:
        UserError: weights are missing or do not fit, or a proof fails.
        TrainingError: as ``kit.strategy.accelerator.prepare``.
    """
    accelerator, topology, trains = session.accelerator, session.topology, data is not None
    session.enter(phases.LOADING)
    compiler = Compiler(recipe.torch_compile == "auto") if trains and recipe.torch_compile else None
    with together(accelerator):  # an error on one rank stops all ranks
        model = build_model(
            recipe,
            config,
            session.load_plan,
            packing=recipe.packing,
            seed=recipe.seed,
            router_aux_loss_coef=recipe.router_aux_loss_coef if trains else None,
            compiler=compiler,
        )
    vocab_size, optimizer, notes = num_rows(model), None, []
    if trains:
        notes = describe_parts(model, recipe, recipe.router_aux_loss_coef)
        optimizer = build_optimizer(model, recipe, recipe.peak_learning_rate, recipe.seed)
        notes += keep_lr_multipliers(optimizer, recipe.peak_learning_rate)
        if compiler:
            compiler.compile_layers(model, layer_classes(topology, model))
    session.guard.set_model(model, optimizer)
    prepared = prepare(accelerator, topology, model, optimizer)
    session.guard.set_model(prepared.model, prepared.optimizer)
    if weights:
        load_weights(prepared.model, weights)
    policy = Policy(**vars(prepared), tokenizer=tokenizer, notes=notes, compiler=compiler)
    if data:
        check_causality(policy, vocab_size)
        policy.notes += prove_head(policy, vocab_size)
        if data.media:
            pads = max(recipe.num_rows, recipe.eval_batch_size) > 1
            prove_media(policy, data.encoder, data.media, recipe.packing, pads)
        if recipe.packing:
            check_isolation(policy, vocab_size, data.encoder.pack_length, data.media)
    if compiler:
        compile_first(policy, compiler, recipe, recipe.num_rows)
    return policy
