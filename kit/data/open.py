"""Open the training and evaluation data of a run.

Promises:

- ``open_data`` reports all problems of the data together, before any weight is read.
- The split that is held out for evaluation depends only on the data and the seed, so it is the same on every rank.
- Evaluation samples that are also in the training data are counted, and the user is warned.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kit.config.settings.data import DataSettings
from kit.config.settings.evaluation import EvalSettings
from kit.data.chat.template import resolve_template
from kit.data.chat.tokens import MediaCodec
from kit.data.feed.data import Data
from kit.data.feed.order import Order
from kit.data.feed.subsets import drawn, hold_out, leak_notes, limited
from kit.data.kinds.answers import ANSWER_ROWS
from kit.data.kinds.kind import RowKind
from kit.data.kinds.prompts import PromptRows
from kit.data.samples.bad_rows import notes_of
from kit.data.samples.checks import check_datasets, reading_notes
from kit.data.samples.dataset import Dataset
from kit.data.samples.rows import NO_MEDIA, Encoder
from kit.data.samples.samples import Samples, Store
from kit.data.samples.tokenise import tokenise
from kit.data.stream.stream import Stream, check_beginning
from kit.system.cache import exposure
from kit.system.errors import Problem, UserError


def open_data(
    settings: DataSettings,
    datasets: Sequence[Dataset],
    tokenizer: Any,
    vocab_size: int,
    *,
    eval_settings: EvalSettings,
    seed: int,
    global_batch_size: int,
    kind: RowKind = ANSWER_ROWS,
    rollout_steps: int = 0,
    media: MediaCodec | None = None,
    no_media: Problem = NO_MEDIA,
    tools: Sequence[dict[str, Any]] = (),
) -> Data:
    """Read, validate and tokenise ``datasets``, or take the result from the cache.

    The stages: an encoder of the settings; whether the datasets fit them; the samples of each dataset; those that the
    run uses; their order.

    Args:
        vocab_size: rows of the model's embedding.
        global_batch_size: samples, or packs, of one step.
        kind: the dataset type that the objective needs.
        rollout_steps: steps on the model's own answers to one batch of prompts (GRPO); 0: on those of the data.
        images: what stands for images in the text, and makes their pixels; None: a row with one has ``no_media``.
        tools: JSON schemas of those that the chat template lists in every prompt.

    Raises:
        UserError: with all problems of all datasets.
    """
    template = resolve_template(tokenizer, settings.chat_template, settings.chat_template_kwargs)
    encoder = Encoder(tokenizer, template, settings, vocab_size, kind, media, no_media, tools)
    of_training = replace(encoder, kind=PromptRows()) if rollout_steps else encoder
    holds_out = bool(eval_settings.eval_split_size)
    problems = check_datasets(datasets, encoder, eval_settings.predict_with_generate, holds_out)
    notes = exposure()
    train_stores: list[Store] = []
    eval_stores: list[Store] = []
    for dataset in datasets:
        notes += dataset.source.notes
        with problems.caught():
            notes += reading_notes(dataset, encoder)
            if settings.streaming and not dataset.is_evaluation:
                notes += check_beginning(dataset, encoder, settings.on_bad_row == "skip")
            else:
                store = _tokenised(dataset, encoder if dataset.is_evaluation else of_training, settings)
                notes += notes_of(dataset.source.name, store.info, settings.max_length)
                (eval_stores if dataset.is_evaluation else train_stores).append(store)
    problems.raise_if_any()

    evaluation = Samples(eval_stores) if eval_stores else None
    if evaluation is not None:
        limits = [dataset.entry.max_samples for dataset in datasets if dataset.is_evaluation]
        evaluation = drawn(evaluation, limits, seed, notes)
    train_datasets = [dataset for dataset in datasets if not dataset.is_evaluation]
    if not settings.streaming:
        train = drawn(Samples(train_stores), [dataset.entry.max_samples for dataset in train_datasets], seed, notes)
        if eval_settings.eval_split_size:
            train, evaluation = hold_out(train, eval_settings.eval_split_size, seed, notes)
        train = limited(train, settings.max_train_samples, "training", notes)
    if evaluation is not None:
        evaluation = limited(evaluation, eval_settings.max_eval_samples, "evaluation", notes)
        _check_number(evaluation)
    if settings.streaming:
        return Stream(settings, seed, train_datasets, encoder, evaluation, tuple(notes))
    _check_number(train)
    if rollout_steps:
        train = _with_room(train, settings.max_length, eval_settings.max_new_tokens, notes)
        if evaluation is not None and not eval_stores:  # held out of these rows
            short = np.flatnonzero(evaluation.lengths <= settings.max_length)
            if num_long := len(evaluation) - len(short):
                notes.append(f"{num_long} of {len(evaluation)} samples held out are longer than max_length: left out")
            evaluation = evaluation.select(short, "not too long") if len(short) else None
    notes += leak_notes(train, evaluation)

    weights = [dataset.entry.weight for dataset in train_datasets]  # all of them are set, or none
    order = Order(
        train.lengths,
        train.dataset_ids,
        seed,
        global_batch_size,
        weights=None if weights[0] is None else [weight or 0.0 for weight in weights],
        capacity=encoder.pack_length if settings.packing and not rollout_steps else None,
        shuffle=settings.shuffle,
    )
    notes = [*train.kind.summary(train), *notes]
    if (num := order.num_items(0)) < global_batch_size:
        items = "packs" if settings.packing and not rollout_steps else "samples"
        few = f"{num} {items} are fewer than the {global_batch_size} of a step"
        notes.append(f"{few}: every step sees some of them more than once")
    steps = max(1, rollout_steps)
    return Data(settings, seed, train_datasets, encoder, evaluation, tuple(notes), train, order, steps)


def _with_room(train: Samples, max_length: int, max_new_tokens: int, notes: list[str]) -> Samples:
    """The samples whose prompt leaves room for an answer. Raises ``UserError`` if there is none."""
    starts = train.answer_spans[:, 0]
    chosen = np.flatnonzero((starts > 0) & (starts + max_new_tokens <= max_length))
    found = f"{len(train) - len(chosen)} of {len(train)} samples have no prompt, or one of more than "
    found += f"{max_length - max_new_tokens} tokens, which leaves less than max_new_tokens of max_length"
    if not len(chosen):
        raise UserError("max_length", found, fix="raise --max_length, or lower --max_new_tokens")
    if len(chosen) == len(train):
        return train
    notes.append(f"{found}: left out")
    return train.select(chosen, "prompts with room")


def _tokenised(dataset: Dataset, encoder: Encoder, settings: DataSettings) -> Store:
    """The samples of a dataset. Raises ``UserError`` if they cannot be trained on as they are."""
    name = dataset.source.name
    store = tokenise(dataset, encoder, settings.dataset_num_proc, settings.on_bad_row == "skip")
    samples = store.arrays["samples"]
    is_all_supervised = samples["num_targets"].sum() == (samples["length"] - 1).sum()
    if settings.train_on != "all" and dataset.format.is_chat and is_all_supervised:
        found = "every token of every conversation is supervised, the questions too"
        fix = "give the file of a template that writes prompts as --chat_template; or --train_on all"
        raise UserError(name, found, fix=fix)
    return store


def _check_number(samples: Samples) -> None:
    if samples.kind.too_few and len(samples) < 2:
        raise UserError(samples.stores[0].source.name, "a single sample", samples.kind.too_few)


def last_ids(samples: Samples) -> set[int]:
    """Return the tokens with which texts for a head end, of all datasets of ``samples``."""
    ids: set[int] = set()
    for store in samples.stores:
        ends = np.cumsum(store.arrays["sequence_lengths"], dtype=np.int64) - 1
        ids.update(np.unique(store.arrays["input_ids"][ends]).tolist())
    return ids


def pad_id(tokenizer: Any) -> int:
    """Return the id to pad with: that of EOS. Any id of the model works, because padding is masked by position."""
    return int(tokenizer.eos_token_id or 0)


def stop_ids(data: Data, tokenizer: Any) -> set[int]:
    """Return the special tokens that end answers: the last supervised token of at least one in a hundred samples.

    Looks at a thousand samples, spread over the data, or over the first blocks of a stream.
    """
    samples, ends = data.looked_at, Counter[int]()
    for i in np.linspace(0, len(samples) - 1, min(len(samples), 1000)).astype(np.int64).tolist():
        ids, weights = samples[i]
        if weights.any():
            ends[int(ids[np.flatnonzero(weights)[-1]])] += 1
    if not ends and data.text_form == "chat":
        ends.update(data.encoder.answer_ends())
    special = tokenizer.added_tokens_decoder
    return {token_id for token_id, count in ends.items() if token_id in special and count >= 0.01 * ends.total()}
