"""Open the training and evaluation data of a run.

Promises:

- ``open_data`` reports all problems of the data together, before any weight is read.
- The split that is held out for evaluation depends only on the data and the seed, so it is the same on every rank.
- Evaluation samples that are also in the training data are counted, and the user is warned.
"""

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from kit.cache import digest
from kit.config.recipe import Recipe
from kit.data.chat.columns import choose_fields
from kit.data.chat.formats import format_of, to_sample
from kit.data.chat.template import Jinja, resolve_template
from kit.data.feed.feed import Feed
from kit.data.feed.order import Mixture, Order
from kit.data.feed.ranks import Ranks
from kit.data.feed.stream import Stream, check_beginning, first_piece
from kit.data.feed.subsets import hold_out, leak_notes, limited_evaluation, limited_training, without_repeats
from kit.data.read.sources import open_source
from kit.data.samples.rows import Encoder, Opened, Piece
from kit.data.samples.samples import Samples, Store
from kit.data.samples.tokenise import tokenise
from kit.errors import Problem, Problems, UserError, raise_if


@dataclass(frozen=True)
class Data:
    """The tokenised data of a run. With ``streaming`` a run has a ``kit.data.feed.stream.Stream`` instead."""

    train: Samples
    evaluation: Samples | None
    order: Order
    chat_template: Jinja  # to be saved with the model
    notes: tuple[str, ...]  # lines for the user

    @property
    def fingerprint(self) -> str:
        """Identifies the training data. Evaluation data are not in it: a run may continue with other ones."""
        return digest(self.train.fingerprint, self.order.quotas) if self.order.quotas else self.train.fingerprint

    def whole_epochs_after(self, num_steps: int) -> int:
        """Return how many epochs the first ``num_steps`` steps complete."""
        return self.order.whole_epochs_after(num_steps)

    def total_steps(self, recipe: Recipe) -> int:
        """Return the optimiser steps of the whole run: ``max_steps``, else as many as the epochs need, rounded up."""
        return recipe.max_steps or self.order.total_steps(recipe.num_train_epochs)

    def skipped_rows(self) -> list[dict[str, Any]]:
        """Return the rows that were left out because they cannot be used, with what is wrong with each."""
        return [row for store in self._stores() for row in store.skipped.listed()]

    def _stores(self) -> list[Store]:
        """The stores of the training and the evaluation data, each once."""
        both = [*self.train.stores, *(self.evaluation.stores if self.evaluation else [])]
        return list({id(store): store for store in both}.values())

    def open_feed(self, recipe: Recipe, ranks: Ranks, pad_token_id: int, state: dict[str, Any]) -> Feed:
        """Open the global batches of the run. ``state`` is not needed: the step's number determines its samples."""
        return Feed(self.train, self.order, recipe, ranks, pad_token_id, self.total_steps(recipe))

    @property
    def names(self) -> list[str]:
        """The names of the sources of the training data."""
        return self.train.names

    def describe(self) -> dict[str, Any]:
        """Return what ``run.json`` records of the data."""
        evaluation = self.evaluation and {"fingerprint": self.evaluation.fingerprint, **self.evaluation.report}
        sources = [store.report for store in self._stores()]
        described = {"train": self.train.report, "evaluation": evaluation, "sources": sources}
        return {"fingerprint": self.fingerprint, **described}


def open_sources(recipe: Recipe) -> list[Opened]:
    """Open all data sets of ``recipe``, and choose the columns to read.

    Raises:
        UserError: with the problems of all data sets.
    """
    problems, opened = Problems(), []
    for flag, entries in (("dataset", recipe.datasets), ("eval_dataset", recipe.eval_datasets)):
        is_evaluation = flag == "eval_dataset"
        for entry in entries:
            with problems.caught():
                streaming = recipe.streaming and not is_evaluation
                source = open_source(entry.path, entry.split or "", flag, entry.config, streaming)
                fields = choose_fields(source.columns, entry.columns or {}, source.name, is_evaluation)
                opened.append(Opened(entry, source, fields, is_evaluation))
    # What is missing both to train and to evaluate on is told once: to score, eval_dataset stands for both.
    raise_if({(each.where.removeprefix("eval_"), each.found): each for each in problems}.values())
    return opened


def open_data(recipe: Recipe, sources: list[Opened], tokenizer: Any, vocab_size: int) -> Data | Stream:
    """Read, validate and tokenise ``sources``, or take the result from the cache.

    Args:
        vocab_size: rows of the model's embedding.

    Raises:
        UserError: with all problems of all data sets.
    """
    template = resolve_template(tokenizer, recipe.chat_template, recipe.chat_template_kwargs)
    encoder = Encoder(
        tokenizer,
        template,
        prompts_as_chat=recipe.chat_template is not None,
        train_on=recipe.train_on,
        max_length=recipe.max_length,
        excess_length_strategy=recipe.excess_length_strategy,
    )
    problems = Problems(_format_problems(recipe, sources))
    if pad_id(tokenizer) >= vocab_size:
        found = f"its pad token has id {pad_id(tokenizer)}, but the model has {vocab_size} embeddings"
        fix = "take pad_token out of tokenizer_config.json: padding is masked, any id serves"
        problems.append(Problem("model_name_or_path", found, fix=fix))
    parts: dict[bool, list[Samples]] = {False: [], True: []}
    notes = []
    for opened in sources:
        with problems.caught():
            if recipe.streaming and not opened.is_evaluation:
                max_id, more = check_beginning(opened, encoder, recipe.on_bad_row == "skip")
                _check_ids(max_id, opened, vocab_size)
                notes += more
                continue
            samples = tokenise(opened, encoder, recipe.dataset_num_proc, recipe.on_bad_row == "skip")
            _check_samples(samples, opened, recipe, vocab_size)
            parts[opened.is_evaluation].append(samples)
            notes += samples.stores[0].notes(recipe.max_length)
    problems.raise_if_any()

    evaluation = Samples([samples.stores[0] for samples in parts[True]]) if parts[True] else None
    training = [opened for opened in sources if not opened.is_evaluation]
    if recipe.streaming:
        evaluation = limited_evaluation(evaluation, recipe, notes)
        return Stream(training, encoder, vocab_size, evaluation, template, tuple(notes))
    train = Samples([samples.stores[0] for samples in parts[False]])
    weights = [opened.entry.weight for opened in training]
    if recipe.dedup:
        train = without_repeats(train, notes)
    if recipe.eval_split_size:
        train, evaluation = hold_out(train, recipe.eval_split_size, recipe.seed)
        notes.append(f"{len(evaluation)} samples held out for evaluation, {len(train)} left to train on")
    train = limited_training(train, recipe, notes)
    evaluation = limited_evaluation(evaluation, recipe, notes)
    notes += leak_notes(train, evaluation)
    order = Order(
        train.lengths,
        train.sources,
        recipe.seed,
        recipe.global_batch_size,
        None if weights[0] is None else Mixture([weight or 0.0 for weight in weights], recipe.mixing),
        recipe.max_length if recipe.packing else None,
        recipe.shuffle,
    )
    if order.num_items(0) < recipe.global_batch_size:
        items = "packs" if recipe.packing else "samples"
        few = f"{order.num_items(0)} {items} are fewer than global_batch_size {recipe.global_batch_size}"
        notes.append(f"{few}: every step sees some of them more than once")
    return Data(train, evaluation, order, template, (_summary(train), *notes))


def _format_problems(recipe: Recipe, sources: list[Opened]) -> list[Problem]:
    """Return a problem for each setting that cannot be used with the format of a source."""
    problems = []
    for opened in sources:
        name, fields = opened.source.name, opened.fields
        is_evaluated = opened.is_evaluation or recipe.eval_split_size
        if recipe.predict_with_generate and is_evaluated and ("text" in fields or "input_ids" in fields):
            found = f"{name} is {'plain text' if 'text' in fields else 'token ids'}, which asks nothing"
            problems.append(Problem("predict_with_generate", found, "messages, or prompt and completion"))
        if recipe.excess_length_strategy == "split" and "text" not in fields:
            found = f"split, but {name} holds {format_of(fields)}: half a conversation teaches nothing"
            problems.append(Problem("excess_length_strategy", found, "truncate, drop or error"))
    return problems


def _check_ids(max_id: int, opened: Opened, vocab_size: int) -> None:
    if max_id >= vocab_size:
        found = f"token id {max_id}, but the model has {vocab_size} embeddings"
        raise UserError(
            Problem(opened.source.name, found, "ids below it", "use the tokenizer that belongs to the model")
        )


def _check_samples(samples: Samples, opened: Opened, recipe: Recipe, vocab_size: int) -> None:
    """Raise ``UserError`` if the tokenised samples of a source have wrong ids, or no masked token in any chat."""
    name = opened.source.name
    _check_ids(samples.max_id, opened, vocab_size)
    is_chat = format_of(opened.fields).is_chat and recipe.train_on != "all"
    if is_chat and samples.num_targets.sum() == (samples.lengths - 1).sum():
        found = "every token of every conversation is supervised, the questions too"
        raise UserError(Problem(name, found, fix="check the chat template, or say --train_on all"))


def _summary(train: Samples) -> str:
    num_tokens, num_targets = (int(values.sum(dtype=np.int64)) for values in (train.lengths, train.num_targets))
    share = num_targets / num_tokens
    return f"training data: {len(train)} samples, {num_tokens} tokens, {num_targets} of them supervised ({share:.1%})"


def describe_rendering(recipe: Recipe, sources: list[Opened], tokenizer: Any) -> list[str]:
    """Say of each evaluation data set how its rows become text: by which chat template, or as plain text."""
    folder = os.path.expanduser(recipe.adapter_name_or_path or recipe.model_name_or_path)
    own = os.path.join(folder, "chat_template.jinja")
    template = recipe.chat_template or "of the tokenizer"
    lines = []
    for opened in sources:
        if not opened.is_evaluation:
            continue
        how = f"rendered with the chat template {template}"
        if "text" in opened.fields or "input_ids" in opened.fields:
            how = "plain text" if "text" in opened.fields else "token ids, as they are"
        elif recipe.chat_template is None and _holds_prompts_as_texts(opened):
            how = "prompt and completion, joined as plain text"
            if tokenizer.chat_template:
                how += " although the tokenizer has a chat template; to score them as chat: --chat_template "
                how += own if os.path.isfile(own) else "with the name or file of the model's template"
        lines.append(f"{opened.source.name}: {how}")
    return lines


def _holds_prompts_as_texts(opened: Opened) -> bool:
    """Whether the first row has prompt and completion as texts, not as messages."""
    part = opened.source.parts[0]
    row: Any = next((row for block in part.blocks(opened.columns) for _, row in part.rows(block)), {})
    sample = to_sample(row, opened.fields)
    return isinstance(sample, dict) and isinstance(sample.get("prompt"), str)


def pad_id(tokenizer: Any) -> int:
    """Return the id to pad with. Any id works, because padding is masked by position."""
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def stop_ids(data: Data | Stream, tokenizer: Any) -> set[int]:
    """Return the special tokens that end answers: the last supervised token of at least one in a hundred samples.

    Looks at a thousand samples, spread over the data, or at the first block of each stream.
    """
    if isinstance(data, Data):
        pieces: list[Any] = [data.train]
    else:
        pieces = [first_piece(opened, data.encoder) for opened in data.opened]
    ends: Counter[int] = Counter()
    for piece in pieces:
        num = len(piece.samples) if isinstance(piece, Piece) else len(piece)
        for i in np.linspace(0, num - 1, min(num, 1000)).astype(np.int64).tolist():
            ids, weights = piece[i]
            ends[int(ids[np.flatnonzero(weights)[-1]])] += 1
    special = tokenizer.added_tokens_decoder
    return {id_ for id_, count in ends.items() if id_ in special and count >= 0.01 * ends.total()}


def prompt_and_reference(samples: Samples, i: int) -> tuple[list[int], list[int]]:
    """Split sample ``i`` for generation.

    Returns:
        The ids before its last span of supervised tokens (the prompt), and the ids of that span (the reference).
    """
    tokens, weights = samples[i]
    end = int(np.flatnonzero(weights)[-1]) + 1
    start = int(np.flatnonzero(weights[:end] == 0)[-1]) + 1 if not weights[:end].all() else 0
    return tokens[:start].tolist(), tokens[start:end].tolist()
