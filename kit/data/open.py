"""Open the training and evaluation data of a run.

Promises:

- ``open_data`` reports all problems of the data together, before any weight is read.
- The split that is held out for evaluation depends only on the data and the seed, so it is the same on every rank.
- Evaluation samples that are also in the training data are counted, and the user is warned.
"""

import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kit.cache import allow_open_files, cache_folder, digest, exposure
from kit.config.settings.data import DataSettings
from kit.config.settings.evaluation import EvalSettings
from kit.config.settings.objective import Rows
from kit.config.settings.optimisation import OptimSettings
from kit.data.chat.columns import columns_flag
from kit.data.chat.formats import NO_COLUMN, Sample, format_of
from kit.data.chat.messages import check_text
from kit.data.chat.preferences import is_transcript
from kit.data.chat.template import Jinja, resolve_template
from kit.data.chat.tokens import encode_all
from kit.data.feed.feed import Feed
from kit.data.feed.mismatched import Mismatched
from kit.data.feed.order import PACKING_VERSION, Mixture, Order
from kit.data.feed.ranks import Ranks
from kit.data.feed.stream import Stream, check_beginning, first_piece
from kit.data.feed.subsets import drawn, hold_out, leak_notes, limited_evaluation, limited_training, without_repeats
from kit.data.read.sources import read_rows
from kit.data.samples.dataset import Dataset
from kit.data.samples.rows import Encoder, Piece, with_system
from kit.data.samples.samples import FILES_OF_STORE, Samples, Store
from kit.data.samples.tokenise import tokenise
from kit.errors import Problem, Problems, UserError, listed

FIX_FILES = "make a list of them, each with its columns: --dataset '[{path: FILE, columns: \"COLUMN=FIELD\"}, ...]'"


@dataclass(frozen=True)
class Data:
    """The tokenised data of a run. With ``streaming`` a run has a ``kit.data.feed.stream.Stream`` instead."""

    settings: DataSettings
    train: Samples
    evaluation: Samples | None
    order: Order
    datasets: Sequence[Dataset]  # to train on
    encoder: Encoder
    seed: int
    notes: tuple[str, ...] = ()  # lines for the user

    @property
    def chat_template(self) -> Jinja:
        """The template to be saved with the model."""
        return self.encoder.template

    @property
    def fingerprint(self) -> str:
        """Identifies the training data. Evaluation data are not in it: a run may continue with other ones."""
        return digest(self.train.fingerprint, self.order.quotas) if self.order.quotas else self.train.fingerprint

    def contents(self) -> dict[str, str]:
        """Return what machines compare of the training data, by what a message names."""
        return {"dataset": self.fingerprint}

    @property
    def dataset_names(self) -> list[str]:
        """The names of the training data sets."""
        return self.train.dataset_names

    def whole_epochs_after(self, num_steps: int) -> int:
        """Return how many epochs the first ``num_steps`` steps complete."""
        return self.order.whole_epochs_after(num_steps)

    def total_steps(self, settings: OptimSettings) -> int:
        """Return the optimiser steps of the whole run: ``max_steps``, or those of ``num_train_epochs`` rounded up."""
        return settings.max_steps or self.order.total_steps(settings.num_train_epochs)

    def skipped_rows(self) -> list[dict[str, Any]]:
        """Return the rows that were left out because they cannot be used, with what is wrong with each."""
        return [row for store in self._stores() for row in store.skipped.listed()]

    def open_feed(
        self,
        settings: OptimSettings,
        ranks: Ranks,
        pad_token_id: int,
        state: Mapping[str, Any],
        output_dir: str | None = None,
    ) -> Feed:
        """Open the global batches of the run.

        The arguments are those of ``Stream.open_feed``. ``state`` and ``output_dir`` are not needed here: the number of
        a step determines its samples, and the skipped rows are known before the run.
        """
        num_steps = self.total_steps(settings)
        return Feed(
            self.train,
            self.order,
            self.settings,
            settings.micro_batch_size,
            ranks,
            pad_token_id,
            num_steps,
            self.mismatched(self.train),
        )

    def mismatched(self, samples: Samples) -> Mismatched | None:
        """Return the answers to other prompts that belong to ``samples``; None unless they are answers with a label."""
        return Mismatched(samples, self.seed, self.settings.max_length) if samples.are_rated else None

    def describe(self) -> dict[str, Any]:
        """Return what ``run.json`` records of the data."""
        evaluation = None
        if self.evaluation is not None:
            evaluation = {"fingerprint": self.evaluation.fingerprint, **self.evaluation.report}
        return {
            "fingerprint": self.fingerprint,
            "train": self.train.report,
            "evaluation": evaluation,
            "sources": [store.report for store in self._stores()],
        }

    def _stores(self) -> list[Store]:
        """The stores of the training and the evaluation data, each once."""
        stores = list(self.train.stores)
        if self.evaluation is not None:  # what is held out has the stores of the training data
            stores += [store for store in self.evaluation.stores if not any(store is other for other in stores)]
        return stores


def open_data(
    settings: DataSettings,
    datasets: Sequence[Dataset],
    tokenizer: Any,
    vocab_size: int,
    *,
    eval_settings: EvalSettings,
    seed: int,
    global_batch_size: int,
    wanted: Rows = "answers",
) -> Data | Stream:
    """Read, validate and tokenise ``datasets``, or take the result from the cache.

    Args:
        vocab_size: rows of the model's embedding.
        global_batch_size: samples, or packs, of one step.
        wanted: what the rows hold, as the objective asks for it.

    Raises:
        UserError: with all problems of all data sets.
    """
    template = resolve_template(tokenizer, settings.chat_template, settings.chat_template_kwargs)
    encoder = Encoder(
        tokenizer,
        template,
        prompts_as_chat=settings.chat_template is not None,
        train_on=settings.train_on,
        max_length=settings.max_length,
        excess_length_strategy=settings.excess_length_strategy,
        wanted=wanted,
        system_prompt=settings.system_prompt,
    )
    problems = Problems()
    problems += _wording_problems(datasets)
    if settings.system_prompt:
        problems += _system_problems(encoder, datasets)
    for dataset in datasets:
        is_evaluated = dataset.is_evaluation or bool(eval_settings.eval_split_size)
        generates = eval_settings.predict_with_generate and is_evaluated
        problems += _format_problems(dataset, generates, settings.excess_length_strategy)
    if pad_id(tokenizer) >= vocab_size:
        found = f"its pad token has id {pad_id(tokenizer)}, but the model has {vocab_size} embeddings"
        fix = "take pad_token out of tokenizer_config.json: padding is masked, so any id is right"
        problems.append(Problem("model_name_or_path", found, fix=fix))

    num_stores = sum(dataset.is_evaluation or not settings.streaming for dataset in datasets)
    allow_open_files(FILES_OF_STORE * num_stores, "dataset")
    skips = settings.on_bad_row == "skip"
    train_stores: list[Store] = []
    eval_stores: list[Store] = []
    notes = exposure()
    for dataset in datasets:
        notes += dataset.source.notes
        with problems.caught(), _other_columns_named(dataset):
            notes += _reading_notes(dataset, encoder)
            if settings.streaming and not dataset.is_evaluation:
                max_id, beginning_notes = check_beginning(dataset, encoder, skips)
                _check_ids(max_id, dataset.source.name, vocab_size)
                notes += beginning_notes
                continue
            store = tokenise(dataset, encoder, settings.dataset_num_proc, skips)
            _check_ids(store.max_id, dataset.source.name, vocab_size)
            if settings.train_on != "all":
                _check_masks(store, dataset)
            if dataset.is_evaluation:
                eval_stores.append(store)
            else:
                train_stores.append(store)
            notes += store.notes(settings.max_length)
    problems.raise_if_any()

    evaluation = Samples(eval_stores) if eval_stores else None
    if evaluation is not None:
        limits = [dataset.entry.max_samples for dataset in datasets if dataset.is_evaluation]
        evaluation = drawn(evaluation, limits, seed, notes)
    max_eval_samples = eval_settings.max_eval_samples
    train_datasets = [dataset for dataset in datasets if not dataset.is_evaluation]
    if settings.streaming:
        evaluation = limited_evaluation(evaluation, max_eval_samples, notes)
        return Stream(settings, seed, train_datasets, encoder, vocab_size, evaluation, template, tuple(notes))
    train = drawn(Samples(train_stores), [dataset.entry.max_samples for dataset in train_datasets], seed, notes)
    if settings.dedup:
        train = without_repeats(train, notes)
    if eval_settings.eval_split_size:
        train, evaluation = hold_out(train, eval_settings.eval_split_size, seed)
        notes.append(f"{len(evaluation)} samples held out for evaluation, {len(train)} left to train on")
    train = limited_training(train, settings.max_train_samples, notes)
    evaluation = limited_evaluation(evaluation, max_eval_samples, notes)
    notes += leak_notes(train, evaluation)
    for samples in (train, evaluation):
        if samples is not None and samples.are_rated and len(samples) < 2:
            name = samples.stores[0].source.name
            raise UserError(Problem(name, "a single sample", "two: kto sets each prompt beside the answer to another"))
    weights = [dataset.entry.weight for dataset in train_datasets]  # all of them are set, or none
    contents = (PACKING_VERSION, train.fingerprint, weights, settings.mixing, seed, settings.max_length)
    order = Order(
        train.lengths,
        train.dataset_ids,
        seed,
        global_batch_size,
        mixture=None if weights[0] is None else Mixture([weight or 0.0 for weight in weights], settings.mixing),
        capacity=encoder.pack_length if settings.packing else None,
        shuffle=settings.shuffle,
        counts_file=cache_folder() / "packs" / f"{digest(*contents)}.json",
    )
    num_items = order.num_items(0)
    if num_items < global_batch_size:
        items = "packs" if settings.packing else "samples"
        few = f"{num_items} {items} are fewer than global_batch_size {global_batch_size}"
        notes.append(f"{few}: every step sees some of them more than once")
    return Data(settings, train, evaluation, order, train_datasets, encoder, seed, (*_summary(train), *notes))


def _wording_problems(datasets: Sequence[Dataset]) -> list[Problem]:
    """Return a problem for each evaluation data set of instructions that lacks the wording of the training data."""
    formats = {dataset.entry.prompt_format for dataset in datasets if not dataset.is_evaluation} - {None}
    problems = []
    for dataset in datasets:
        unsaid = dataset.is_evaluation and "instruction" in dataset.fields and dataset.entry.prompt_format is None
        if formats and unsaid:
            found = "instructions without a prompt_format, while the training data have one"
            fix = "give its entry in eval_dataset the same prompt_format"
            problems.append(Problem(dataset.source.name, found, "the same wording", fix))
    return problems


def _system_problems(encoder: Encoder, datasets: Sequence[Dataset]) -> list[Problem]:
    """Return a problem for each data set to train on that has no messages; else that of a template that takes none."""
    assert encoder.system_prompt is not None
    problems = check_text("system_prompt", encoder.system_prompt)
    for dataset in [each for each in datasets if not each.is_evaluation]:
        sample = _first_sample(dataset)
        with_message = with_system(sample | {"completion": ""}, encoder.system_prompt, encoder.prompts_as_chat)
        if sample and not any(isinstance(with_message.get(name), list) for name in ("messages", "prompt")):
            found = f"given, but {dataset.source.name} holds {format_of(dataset.fields)}, where no message can stand"
            problems.append(Problem("system_prompt", found, "conversations", "leave out --system_prompt"))
    question, answer = {"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}
    conversation = [{"role": "system", "content": encoder.system_prompt}, question, answer]
    if not problems:
        (result,) = encode_all([{"messages": conversation}], encoder.tokenizer, encoder.template, True, "assistant")
        if isinstance(result, Problem):
            found = f"the chat template takes no such message: {result.where}: {result.found}"
            problems.append(Problem("system_prompt", found, fix="leave out --system_prompt"))
    return problems


def _format_problems(dataset: Dataset, generates: bool, excess_length_strategy: str) -> list[Problem]:
    """Return a problem for each setting that cannot be used with the format of a data set.

    Args:
        generates: answers to its samples are generated, to evaluate them.
    """
    problems = []
    name, fields = dataset.source.name, dataset.fields
    if generates and ("text" in fields or "input_ids" in fields):
        found = f"{name} is {'plain text' if 'text' in fields else 'token ids'}, which asks nothing"
        problems.append(Problem("predict_with_generate", found, "messages, or prompt and completion"))
    if excess_length_strategy == "split" and "text" not in fields and format_of(fields).rows == "answers":
        held = " and ".join(ours for ours in fields if ours not in format_of(fields).optional)
        found = f"split, but {name} holds {held}: half a conversation teaches nothing"
        fix = "--excess_length_strategy drop leaves longer ones out; or --excess_length_strategy truncate cuts them"
        problems.append(Problem("excess_length_strategy", found, "truncate, drop or error", fix))
    return problems


def _check_ids(max_id: int, name: str, vocab_size: int) -> None:
    """Raise ``UserError`` if the largest token id of the source ``name`` has no embedding."""
    if max_id >= vocab_size:
        found = f"token id {max_id}, but the model has {vocab_size} embeddings"
        fix = "take the tokens that the model does not know out of its tokenizer, or make input_ids with that tokenizer"
        raise UserError(Problem(name, found, "ids below it", fix))


def _check_masks(store: Store, dataset: Dataset) -> None:
    """Raise ``UserError`` if a data set is chat, but no token of any conversation is masked."""
    if not format_of(dataset.fields).is_chat:
        return
    samples = store.arrays["samples"]
    if samples["num_targets"].sum() == (samples["length"] - 1).sum():
        found = "every token of every conversation is supervised, the questions too"
        raise UserError(
            Problem(
                dataset.source.name,
                found,
                fix="give the file of a template that writes prompts as --chat_template; or --train_on all",
            )
        )


def _summary(train: Samples) -> list[str]:
    num_tokens = int(train.lengths.sum(dtype=np.int64))
    num_targets = int(train.num_targets.sum(dtype=np.int64))
    share = num_targets / num_tokens
    line = f"training data: {len(train)} samples, {num_tokens} tokens, {num_targets} of them supervised ({share:.1%})"
    if not train.are_rated or train.labels is None:
        return [line]
    num_good = int(train.labels.sum())
    lines = [f"{line}; good answers: {num_good}, bad ones: {len(train) - num_good}"]
    if num_good in (0, len(train)):
        missing = "bad" if num_good else "good"
        found = f"there is no {missing} answer, and kto learns from what tells good answers from bad ones"
        lines.append(f"warning: {found}")
    return lines


def describe_rendering(model: str, chat_template: str | None, datasets: Sequence[Dataset], tokenizer: Any) -> list[str]:
    """Say of each evaluation data set how its rows become text: by which chat template, or as plain text.

    Args:
        model: the folder or hub id of the model, or of its adapter.
        chat_template: the recipe's setting.
    """
    lines = []
    for dataset in datasets:
        if not dataset.is_evaluation:
            continue
        if "text" in dataset.fields:
            how = "plain text"
        elif "input_ids" in dataset.fields:
            how = "token ids, as they are"
        elif chat_template is None and isinstance(_first_sample(dataset).get("prompt"), str):
            what = "completion" if format_of(dataset.fields).rows == "answers" else "answers"
            how = f"prompt and {what}, joined as plain text"
            if tokenizer.chat_template:
                how += f" although the tokenizer has a chat template; to score them as chat: {_own_template(model)}"
        else:
            how = f"rendered with the chat template {chat_template or 'of the tokenizer'}"
        lines.append(f"{dataset.source.name}: {how}")
    return lines


def _reading_notes(dataset: Dataset, encoder: Encoder) -> list[str]:
    """Say how the rows of a data set are read, where that may not be what the user expects."""
    notes = []
    source, fields = dataset.source, dataset.fields
    pair = {"chosen", "rejected"}
    if encoder.wanted == "answers" and pair <= set(source.columns) - dataset.ignored - set(fields.values()):
        learned = next(iter(fields))
        notes.append(
            f"{source.name}: chosen and rejected are not used, {learned} are learned; --objective dpo uses both"
        )
    if encoder.prompts_as_chat or (encoder.wanted == "answers" and "prompt" not in fields):
        return notes
    prompt = _first_sample(dataset).get("prompt")
    if not isinstance(prompt, str):
        return notes
    is_at_beginning = "prompt" not in fields
    if is_at_beginning:
        who = "what chosen and rejected both begin with" if encoder.wanted == "pairs" else "all up to the last answer"
        notes.append(f"{source.name}: the prompt is {who}; in the first row it ends with {prompt[-40:]!r}")
    if encoder.template is not None and (is_transcript(prompt) or not is_at_beginning):
        what = "prompt and completion" if encoder.wanted == "answers" else "prompt and answers"
        found = f"{what} are learned as plain text, although the tokenizer has a chat template"
        if encoder.wanted != "answers" and is_transcript(prompt):
            way = f"to make a chat of each transcript: {_own_template(encoder.tokenizer.name_or_path)}"
        else:
            as_chat = {"prompt": "instruction"}
            if encoder.wanted == "answers":
                as_chat["completion"] = "output"
            names = {
                theirs: as_chat.get(ours, ours)
                for ours, theirs in fields.items()
                if ours in as_chat or (theirs != ours and theirs in source.columns)
            }
            way = f"to make a chat of each row: {columns_flag(names)}"
        notes.append(f"{source.name}: {found}; {way}")
    return notes


def _own_template(model: str) -> str:
    """The flag that renders with the template of the model in folder or hub id ``model``."""
    file = os.path.join(os.path.expanduser(model), "chat_template.jinja")
    value = shlex.quote(file) if os.path.isfile(file) else "with the name or file of the model's template"
    return f"--chat_template {value}"


@contextmanager
def _other_columns_named(dataset: Dataset) -> Iterator[None]:
    """Replace problems of rows that lack columns by one, if whole files of the data set have other columns."""
    try:
        yield
    except UserError as error:
        lacks = any(problem.found.startswith(NO_COLUMN) for problem in error.problems)
        if lacks and len(dataset.source.parts) > 1 and (problem := _other_columns(dataset)):
            raise UserError(problem) from None
        raise


def _other_columns(dataset: Dataset) -> Problem | None:
    """The problem of a data set whose files have different columns; None if they have not, or if it is no files."""
    format = format_of(dataset.fields)
    needed = [theirs for ours, theirs in dataset.fields.items() if ours in format.columns]
    others = []
    for part in dataset.source.parts:
        row = next((row for _, _, row in read_rows([part]) if isinstance(row, dict)), None)
        if row is not None and not set(needed) <= row.keys():
            others.append(f"{part.name} has {', '.join(row) or 'none'}")
    if not others:
        return None
    found = f"not all of its files have the same columns: {listed(others)}"
    return Problem(dataset.source.name, found, f"{' and '.join(needed)} in every row", FIX_FILES)


def _first_sample(dataset: Dataset) -> Sample:
    """The sample of the first row that fits its format; empty if there is none, or if that row does not."""
    for _, _, row in read_rows(dataset.source.parts, dataset.columns):
        if isinstance(row, dict):
            sample = dataset.sample(row)
            return sample if isinstance(sample, dict) else {}
    return {}


def pad_id(tokenizer: Any) -> int:
    """Return the id to pad with. Any id works, because padding is masked by position."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0


def stop_ids(data: Data | Stream, tokenizer: Any) -> set[int]:
    """Return the special tokens that end answers: the last supervised token of at least one in a hundred samples.

    Looks at a thousand samples, spread over the data, or at the first block of each data set of a stream.
    """
    pieces: list[Samples | Piece]
    if isinstance(data, Data):
        pieces = [data.train]
    else:
        pieces = [first_piece(dataset, data.encoder) for dataset in data.datasets]
    ends: Counter[int] = Counter()
    for piece in pieces:
        for i in np.linspace(0, len(piece) - 1, min(len(piece), 1000)).astype(np.int64).tolist():
            ids, weights = piece[i]
            ends[int(ids[np.flatnonzero(weights)[-1]])] += 1
    special = tokenizer.added_tokens_decoder
    return {token_id for token_id, count in ends.items() if token_id in special and count >= 0.01 * ends.total()}


def prompt_and_reference(samples: Samples, i: int) -> tuple[list[int], list[int]]:
    """Split sample ``i`` for generation; of a pair, its chosen half.

    Returns:
        The ids before its last span of supervised tokens (the prompt), and the ids of that span (the reference).
    """
    tokens, weights = samples.sequences(i)[0]
    start, end = reference_span(weights)
    return tokens[:start].tolist(), tokens[start:end].tolist()


def reference_span(weights: np.ndarray) -> tuple[int, int]:
    """Return where the last span of supervised tokens begins and ends, given the weights of a sample [T]."""
    end = int(np.flatnonzero(weights)[-1]) + 1
    masked = np.flatnonzero(weights[:end] == 0)
    return int(masked[-1]) + 1 if len(masked) else 0, end
