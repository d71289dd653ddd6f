"""Row lengths of real data, on which the time of a plan depends.

Promises: samples are tokenised, packed, and dealt to ranks and micro-batches by the code of a run. What is
tokenised is in the cache for the run.

Imports numpy and torch only where data are measured.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kit.config.recipe import Recipe
from kit.memory.workload import Workload
from kit.tools.plan.hardware import Gpu
from kit.tools.plan.speed import Step, step

if TYPE_CHECKING:
    from kit.data.feed.data import Data

STEPS_LOOKED_AT = 50  # whose samples are dealt


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """What the rows of the first steps are like, as a run computes them."""

    num_samples: int  # that were measured
    mean: float  # tokens of a sequence: of a sample, or of each half of a pair
    longest: int
    # Tokens that a sequence, or a pack, takes of a row, padding included, on the rank whose rows are longest; of a pack
    # of pairs, which has twice the length, half of it.
    row: float
    supervised: float  # fraction of these tokens that are supervised
    seen: float  # sum of squared lengths of the sequences of attention, over the sum of their lengths
    num_steps: int  # of the whole run
    epochs: float  # of the whole run: how often it reads each sample

    def __str__(self) -> str:
        """Describe it in a line."""
        return (
            f"data: {self.num_samples:,} samples, mean length {self.mean:,.0f} tokens, longest {self.longest:,}; "
            f"supervised: {self.supervised:.1%} of all computed tokens, with padding"
        )

    def step_of(self, workload: Workload, gpu: Gpu) -> Step | None:
        """Return the parts of a mean step of such rows; None for a GPU whose speed is not known."""
        rows = replace(workload, length=max(1, round(self.row)))
        return step(rows, gpu, self.supervised, self.seen)


def read_training_data(recipe: Recipe, vocab_size: int, reads_images: bool = False) -> "Data":
    """Tokenise the training data of ``recipe``.

    Args:
        reads_images: whether its model has a tower, whose processor is opened.

    Raises:
        UserError: the data or the tokenizer cannot be opened, or rows cannot be used.
    """
    from kit.data.kinds.kinds import KINDS, kind_of
    from kit.data.open import open_data
    from kit.data.samples.dataset import open_datasets
    from kit.model.pretrained.tokenizer import open_tokenizer
    from kit.system.console import silence_libraries

    silence_libraries()
    recipe = recipe.model_copy(update={"eval_dataset": None})
    entries = recipe.dataset_entries, recipe.eval_dataset_entries
    datasets = open_datasets(*entries, recipe.streaming, KINDS[recipe.declared.rows])
    tokenizer = open_tokenizer(recipe)
    media = None
    if reads_images:
        from kit.model.build import build_meta_model, open_config
        from kit.model.media.open import open_media

        config = open_config(recipe)
        media = open_media(recipe, recipe, config, build_meta_model(recipe, config), tokenizer)
    data = open_data(
        recipe.model_copy(update={"streaming": False}),
        datasets,
        tokenizer,
        vocab_size,
        eval_settings=recipe,
        seed=recipe.seed,
        global_batch_size=recipe.global_batch_size,
        kind=kind_of(recipe),
        media=media,
    )
    return data


def measure_lengths(data: "Data", recipe: Recipe, num_ranks: int) -> Lengths:
    """Deal the samples of the first steps to data ranks as a run does, and count.

    Args:
        recipe: with the micro-batch of the run.
    """
    import numpy as np

    from kit.data.feed.batches import Collator

    train, order, total = data.train, data.order, data.total_steps(recipe)
    sequences = train.sequence_lengths.astype(np.int64)  # [N, k]
    lengths = train.lengths if recipe.packing else train.row_lengths  # [N]
    num_sequences = sequences.shape[1]
    collator = Collator(recipe.micro_batch_size, 0, recipe.packing, recipe.max_length)
    widths = []  # of each micro-step, that of the rank with the longest rows
    learned = 0
    for number in range(min(STEPS_LOOKED_AT, total)):
        items = order.batch(number)
        learned += int(sum(train.num_targets[item].sum(dtype=np.int64) for item in items))
        for micro_step in collator.deal(lengths, items, num_ranks):
            rows = [[int(lengths[item].sum(dtype=np.int64)) for item in share] for share in micro_step]
            widths.append(max(map(collator.width, rows)))
    rows_of_pack = num_sequences if recipe.packing else 1
    row = sum(widths) / len(widths) / rows_of_pack
    computed = sum(widths) * recipe.micro_batch_size * num_sequences / rows_of_pack * num_ranks
    own = float(np.square(sequences).sum() / sequences.sum())  # in a pack each sequence attends to itself alone
    epochs = recipe.num_train_epochs
    if recipe.max_steps is not None:
        epochs = recipe.max_steps * recipe.global_batch_size / order.num_items(0)
    return Lengths(
        num_samples=len(lengths),
        mean=float(sequences.mean()),
        longest=int(sequences.max()),
        row=row,
        supervised=learned / computed,
        seen=own if recipe.packing else row,
        num_steps=total,
        epochs=epochs,
    )
