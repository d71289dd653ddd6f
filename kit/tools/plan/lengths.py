"""How long the rows of real data are, which the time of a plan depends on.

Promises: samples are tokenised, packed, and dealt to ranks and micro-batches by the code of a run. What is
tokenised is in the cache for the run.

Imports numpy and torch only where data are measured.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kit.config.recipe import Recipe
from kit.config.settings.optimisation import OptimSettings
from kit.errors import Problems, UserError
from kit.memory.workload import Workload
from kit.tools.plan.hardware import Gpu
from kit.tools.plan.speed import Step, step

if TYPE_CHECKING:
    from kit.data.open import Data

STEPS_LOOKED_AT = 50  # whose samples are dealt


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """What the rows of the first steps are like, as a run computes them."""

    num_samples: int  # that were measured
    shortest: int  # tokens of a sequence: of a sample, or of each half of a pair
    mean: float
    longest: int
    # Tokens that a sequence, or a pack, takes of a row, padding included, on the rank whose rows are longest; of a pack
    # of pairs, which has twice the length, half of it.
    row: float
    padding: float  # share of the computed tokens
    waiting: float  # share of the time in which a GPU waits for the one with the longest rows
    supervised: float  # share of the computed tokens that are learned from
    seen: float  # sum of squared lengths of the sequences of attention, over the sum of their lengths
    num_steps: int  # of the whole run
    epochs: float  # of the whole run: how often it reads each sample

    def __str__(self) -> str:
        """Describe it in a line."""
        return (
            f"data: {self.num_samples:,} samples, sequences of {self.shortest:,} to {self.longest:,} tokens, mean "
            f"{self.mean:,.0f}; of the computed tokens {self.padding:.1%} are padding and {self.supervised:.1%} are "
            f"learned from; a GPU waits {self.waiting:.0%} of the time for the one with the longest rows"
        )

    def step_of(self, workload: Workload, gpu: Gpu) -> Step | None:
        """Return the parts of a mean step of such rows; None for a GPU whose speed is not known."""
        rows = replace(workload, length=max(1, round(self.row)))
        return step(rows, gpu, self.supervised, self.seen)


def read_training_data(recipe: Recipe, vocab_size: int) -> "Data":
    """Tokenise the training data of ``recipe``.

    Raises:
        UserError: the data or the tokenizer cannot be opened, or rows cannot be used.
    """
    from kit.console import silence_libraries
    from kit.data.open import Data, open_data
    from kit.data.samples.dataset import open_datasets
    from kit.model.tokenizer import open_tokenizer

    silence_libraries()
    recipe = recipe.model_copy(update={"eval_dataset": None})
    problems = Problems()
    datasets = []
    tokenizer = None
    with problems.caught():
        datasets = open_datasets(
            recipe.dataset_entries, recipe.eval_dataset_entries, recipe.streaming, recipe.declared.rows
        )
    try:
        tokenizer = open_tokenizer(recipe)
    except UserError as error:
        fix = "leave out --dataset to plan without the lengths of the data"
        problems += [replace(each, fix=f"{each.fix}; or {fix}" if each.fix else fix) for each in error.problems]
    problems.raise_if_any()
    data = open_data(
        recipe.model_copy(update={"streaming": False}),
        datasets,
        tokenizer,
        vocab_size,
        eval_settings=recipe,
        seed=recipe.seed,
        global_batch_size=recipe.global_batch_size,
        wanted=recipe.declared.rows,
    )
    assert isinstance(data, Data)
    return data


def measure_lengths(data: "Data", recipe: Recipe, num_gpus: int) -> Lengths:
    """Deal the samples of the first steps to GPUs as a run does, and count.

    Args:
        recipe: with the micro-batch of the run.
    """
    import numpy as np

    from kit.data.feed.batches import Collator

    sequence_lengths, targets = data.train.sequence_lengths, data.train.num_targets  # [N, k], [N]
    lengths = data.train.lengths if recipe.packing else data.train.row_lengths  # [N]
    num_sequences = sequence_lengths.shape[1]
    collator = Collator(recipe.micro_batch_size, 0, recipe.packing, recipe.max_length)
    computed = 0  # tokens, padding included
    useful = 0  # tokens, without padding
    learned = 0  # tokens that are learned from
    squares = 0  # of the lengths of the sequences of attention
    slowest = 0  # tokens of the rank that has the longest rows, in each micro-step
    num_sequence_rows = 0  # of the rank with the longest rows: sequences of samples, of a pack those of one sample
    for number in range(min(STEPS_LOOKED_AT, data.total_steps(recipe))):
        items = data.order.batch(number)
        for micro_step in collator.deal(lengths, items, num_gpus):
            widths = []
            for share in micro_step:
                if recipe.packing:
                    filled = [int(lengths[item].sum(dtype=np.int64)) for item in share]
                else:  # each sequence of a sample has a row
                    filled = [tokens for item in share for tokens in sequence_lengths[item[0]].tolist()]
                width = collator.width(filled)
                widths.append(width)
                computed += width * len(filled)
                useful += sum(filled)
                if recipe.packing:  # each sequence by itself, and what is left of the row
                    squares += sum(int(np.square(sequence_lengths[item], dtype=np.int64).sum()) for item in share)
                    squares += sum((width - tokens) ** 2 for tokens in filled)
                else:
                    squares += len(filled) * width**2
            rows = recipe.micro_batch_size * (1 if recipe.packing else num_sequences)
            slowest += max(widths) * rows
            num_sequence_rows += recipe.micro_batch_size * num_sequences
        learned += int(sum(targets[item].sum(dtype=np.int64) for item in items))
    return Lengths(
        num_samples=len(lengths),
        shortest=int(sequence_lengths.min()),
        mean=float(sequence_lengths.mean()),
        longest=int(sequence_lengths.max()),
        row=slowest / num_sequence_rows,
        padding=1 - useful / computed,
        waiting=1 - computed / (slowest * num_gpus),
        supervised=learned / computed,
        seen=squares / computed,
        num_steps=data.total_steps(recipe),
        epochs=_num_epochs(data, recipe),
    )


def _num_epochs(data: "Data", settings: OptimSettings) -> float:
    """How often the run reads each sample."""
    if settings.max_steps is None:
        return settings.num_train_epochs
    return settings.max_steps * settings.global_batch_size / data.order.num_items(0)
