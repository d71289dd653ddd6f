"""Prove that a written model is the one that was trained: the same ids, and the same answers within a bound.

Promises: the models see the same token ids, taken from rows of the run's own evaluation data where they are at hand,
and compute in float32, whatever their weights are stored in. What differs is a number with its unit; beyond the bound
it is an error, and no folder is left. For a merge the bound is also a fraction of what the adapter changed, so that a
lost adapter is detected, however small its change.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from kit.config.dataset_entry import DatasetEntry
from kit.config.recipe import Recipe
from kit.data.chat.template import Template, resolve_template
from kit.data.chat.tokens import FORMS, form_of
from kit.data.kinds.kinds import KINDS
from kit.data.read.sources import read_rows
from kit.data.samples.dataset import open_datasets
from kit.data.samples.rows import Encoder
from kit.data.samples.samples import Samples
from kit.model.pretrained.heads import head_of
from kit.system.errors import TrainingError, UserError

NUM_ROWS, MAX_TOKENS = 16, 512  # of the models' inputs: their logits are kept for one row at a time
CALIBRATION_ROWS, CALIBRATION_TOKENS = 512, 2048  # the default of llmcompressor, and the length in its examples
# Mean change of a token's log-probability, in nats, that is taken for rounding: set by hand, not derived.
BOUNDS: Mapping[str, float] = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.05}
# Of a merge it is at most this fraction of what the adapter changed: 1 if it is lost, or added twice. Rounding to
# bfloat16 took 0.03 or less of trained adapters.
FRACTION = 0.25
# What tells pretokenisers apart: digits, spaces, code, contractions, letters of other scripts, emoji.
TEXTS = (
    "Hello! How are you today?",
    "I'd like 1234567 apples,  3.14 pears and 2 x 10^-3 plums... don't you think so?",
    "def add(a, b):\n    return a + b  # the sum\n\n\tprint(add(1, 2))\r\n",
    "Straße, naïve café, Ελληνικά, русский язык, 你好世界, 日本語, 한국어 🙂🚀",
)


@dataclass(frozen=True)
class Rows:
    """What models are compared on."""

    ids: list[list[int]]  # of each row
    compared: list[list[int]]  # of each row, the positions in ``ids`` of the tokens that are compared; from 1 on
    origin: str  # for messages
    texts: tuple[str, ...] = ()  # of the rows, if they are known; else they are decoded
    text_form: str = "chat"  # see ``kit.data.chat.tokens.FORMS``; of texts of the kit this says nothing


# What a model makes of ``Rows``: float64 [N], the log-probability of each of the N compared tokens, in order; or, with
# a classification or embedding head, the scores of each row, or its embedding.
Scores = np.ndarray


@dataclass(frozen=True)
class Change:
    """The difference between the scores of two models."""

    mean: float  # of the absolute changes of log-probabilities, nats per token
    largest: float
    num_tokens: int  # or numbers of a head
    of_head: bool = False

    def __str__(self) -> str:
        what = f"{self.num_tokens} scores or numbers of embeddings differ by {self.mean:.2g}"
        if not self.of_head:
            what = f"log-probabilities of {self.num_tokens} tokens differ by {self.mean:.2g} nats per token"
        return f"{what}, at most {self.largest:.2g}"


def find_rows(run: Recipe | None, tokenizer: Any, vocab_size: int) -> Rows:
    """Return the rows to compare on: those of the run's evaluation data, else ``TEXTS``.

    Args:
        run: the recipe of the run; None: it is not known.
        tokenizer: with the chat template of the run.
    """
    if run is not None:
        entries = run.eval_dataset_entries or run.dataset_entries
        kind = "evaluation" if run.eval_dataset_entries else "training"
        with suppress(UserError, OSError):  # the data was moved, or is on another machine
            return _read(run, entries[0], tokenizer, f"the run's first {kind} rows")
    texts = [tokenizer.bos_token + text if tokenizer.bos_token else text for text in TEXTS]
    with suppress(UserError):
        if chat := plain_template(tokenizer):
            texts = [chat.render(messages, None) for messages in conversations()]
    ids = [[i for i in encode(tokenizer, text) if i < vocab_size] for text in texts]
    return Rows(
        ids,
        [list(range(1, len(row))) for row in ids],
        "texts of the kit, since no evaluation data was found",
        tuple(texts),
    )


def find_calibration(run: Recipe | None, tokenizer: Any) -> list[list[int]]:
    """Return the token ids of rows for calibration: of each training dataset as many, in all ``CALIBRATION_ROWS``.

    Without evaluation data the first rows are left out, because models are compared on them. There are none if the
    training data is not at hand, and of a run with ``qat``, which trains for rounding to nearest.

    Args:
        run: the recipe of the run; None: it is not known.
        tokenizer: with the chat template of the run.
    """
    found: list[list[int]] = []
    if run is None or run.qat:
        return found
    start = 0 if run.eval_dataset_entries else NUM_ROWS
    numbers = start, start + CALIBRATION_ROWS // len(run.dataset_entries)
    with suppress(UserError, OSError):
        for entry in run.dataset_entries:
            found += _read(run, entry, tokenizer, "", numbers, CALIBRATION_TOKENS).ids
    return found


def _read(
    run: Recipe,
    entry: DatasetEntry,
    tokenizer: Any,
    origin: str,
    numbers: tuple[int, int] = (0, NUM_ROWS),
    max_tokens: int = MAX_TOKENS,
) -> Rows:
    kind = KINDS[run.declared.rows]
    (dataset,) = open_datasets([entry], [], run.streaming, kind)
    strategy = "keep_end" if run.excess_length_strategy == "keep_end" else "truncate"
    changes = {"max_length": min(run.max_length, max_tokens), "excess_length_strategy": strategy}
    encoder = Encoder(tokenizer, resolve_template(tokenizer, None), run.model_copy(update=changes), kind=kind.of(run))
    piece = encoder.encode(dataset, islice(read_rows(dataset.source.parts, dataset.columns), *numbers))
    samples = Samples([encoder.as_store(dataset, piece)])
    ids, compared = [], []
    for i in range(len(samples)):
        for row, weights in samples.sequences(i)[: None if kind.pools else 1]:  # of a pair, the chosen answer
            positions = [int(at) for at in np.flatnonzero(weights) if at > 0 or kind.pools]
            if positions:
                ids.append(row.tolist())
                compared.append(positions)
    if not ids:
        raise UserError(*[bad.problem_with_origin for bad in piece.bad[:1]])
    form = form_of(piece.counts) if kind.pools else FORMS[0]
    return Rows(ids, compared, f"{origin} ({len(ids)})", text_form=form)


def conversations() -> list[list[dict[str, str]]]:
    """Return conversations of one, two and three messages."""
    user = [{"role": "user", "content": text} for text in TEXTS]
    answer = {"role": "assistant", "content": "Fine, thanks: 42."}
    return [[user[0]], [user[1], answer], [user[2], answer, user[3]]]


def plain_template(tokenizer: Any) -> Template | None:
    """Return the template with which ``tokenizer`` renders conversations without tools; None if it has none.

    Raises:
        UserError: it does not compile.
    """
    source = tokenizer.chat_template
    source = source.get("default") if isinstance(source, dict) else source
    return Template(source, tokenizer) if source else None


def rendered(tokenizer: Any) -> list[tuple[str, list[int]]]:
    """Return conversations in the template of ``tokenizer``, with their ids; none if it has no template."""
    found = []
    if template := plain_template(tokenizer):
        for messages in conversations():
            with suppress(UserError):  # a template may refuse some
                text = template.render(messages, None, add_generation_prompt=messages[-1]["role"] == "user")
                found.append((text, encode(tokenizer, text)))
    return found


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of ``text``, in which special tokens are written out, as the kit tokenises it."""
    return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def texts_of(rows: Rows, tokenizer: Any) -> list[tuple[str, list[int]]]:
    """Return those of ``rows`` whose text is known with its ids: of some tokenizers decoding does not give it."""
    texts = rows.texts or [tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in rows.ids]
    decoded = zip(texts, rows.ids, strict=True)
    return [(text, ids) for text, ids in decoded if encode(tokenizer, text) == ids]


def score(model: Any, rows: Rows) -> Scores:
    """Compute the scores of a model of transformers or peft, see ``_answers``."""
    numbers: list[float] = []
    for ids, compared, answer in zip(rows.ids, rows.compared, _answers(model, rows), strict=True):
        if answer.ndim == 2:
            answer = answer.gather(1, torch.tensor(ids)[compared][:, None])[:, 0]
        numbers += answer.tolist()
    return np.array(numbers)


@torch.no_grad()
def _answers(model: Any, rows: Rows) -> Iterator[torch.Tensor]:
    """Yield for each row the log-probabilities of all tokens, float32 [n, V], at the n positions that are compared.

    With a head they are its scores, or the embedding. There is no dropout, and the weights stay as they are. It
    computes in float32; quantised, in the dtype of the weights.
    """
    model.eval()
    with nullcontext() if hasattr(model, "hf_quantizer") else _in_float32(model):
        for ids, compared in zip(rows.ids, rows.compared, strict=True):
            output = model(input_ids=torch.tensor([ids]), use_cache=False)
            if head_of(model.config) == "lm":
                yield output.logits[0, torch.tensor(compared) - 1].float().log_softmax(-1)
            elif "logits" in output:
                yield output.logits[0].float()
            else:
                yield F.normalize(output.last_hidden_state[0, -1], dim=0).float()


def describe_agreement(model: Any, quantised: Any, rows: Rows) -> str:
    """Return a line with the mean KL divergence of a quantised language model from the original, and top-1 agreement.

    Both are in memory, because the probabilities of all tokens are compared.
    """
    divergences, same = [], []
    for p, q in zip(_answers(model, rows), _answers(quantised, rows), strict=True):
        divergences += F.kl_div(q, p, log_target=True, reduction="none").sum(-1).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
    of_both = f"mean KL divergence {np.mean(divergences):.2g} nats, top-1 agreement {np.mean(same):.2%}"
    return f"quantised, compared with the model before: {of_both}"


@contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """In the ``with`` block, let ``model`` compute in float32.

    In bfloat16 the two sides of a comparison would round at other places, by more than an adapter may have changed; and
    float32 adapters on a bfloat16 base do not compute at all. A decoder layer is cast only while it runs, so that a
    model in 16 bits does not need twice its memory.
    """
    kinds = getattr(model, "_no_split_modules", None) or ()
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    in_layers = {id(module) for layer in layers for module in layer.modules()}
    held: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # a layer may hold others

    def widen(*modules: Any) -> None:
        owned = [t for module in modules for t in chain(module.parameters(False), module.buffers(False))]
        narrow = {id(t): t for t in owned if t.dtype in (torch.bfloat16, torch.float16)}.values()
        held.append([(tensor, tensor.data) for tensor in narrow])
        for tensor in narrow:
            tensor.data = tensor.data.float()

    def restore(*_: Any) -> None:
        for tensor, data in held.pop():
            tensor.data = data

    hooks = [layer.register_forward_pre_hook(lambda layer, *_: widen(*layer.modules())) for layer in layers]
    hooks += [layer.register_forward_hook(restore, always_call=True) for layer in layers]
    widen(*(module for module in model.modules() if id(module) not in in_layers))
    try:
        yield
    finally:
        restore()
        for hook in hooks:
            hook.remove()


def change_between(one: Scores, other: Scores, of_head: bool = False) -> Change:
    """Compare the scores of two models on the same rows. ``of_head``: they have a classification or embedding head."""
    differences = np.abs(one - other)
    # A probability of zero, or a result that is no number, is no rounding.
    mean, largest = (float(f(differences)) if np.isfinite(differences).all() else math.inf for f in (np.mean, np.max))
    return Change(mean, largest, len(differences), of_head)


def check_change(what: str, change: Change, bound: float, adapter_change: float | None = None, fix: str = "") -> str:
    """Return a line about ``change``.

    Args:
        bound: of the mean change, in nats per token.
        adapter_change: the mean change that a merged adapter made; None: none was merged.
        fix: for the error, what keeps it smaller.

    Raises:
        TrainingError: it is beyond ``bound``.
    """
    limit = f"{bound:.2g}" + (
        f"; the adapter itself changed {adapter_change:.2g}" if adapter_change is not None else ""
    )
    line = f"{what}: {change} (bound {limit})"
    if not change.mean <= bound:
        larger = f"{math.ceil(change.mean * 100) / 100:g}" if math.isfinite(change.mean) else "NATS"
        raise TrainingError(f"{line}: beyond the bound, so nothing was written. {fix}--max_change {larger} accepts it")
    return line


def check_ids(what: str, expected: Sequence[tuple[str, list[int]]], ids: Sequence[Sequence[int]]) -> str:
    """Return a line that says of how many texts the ids are equal.

    Args:
        expected: texts with the ids that the model was trained on.
        ids: of the same texts, from another tokenizer.

    Raises:
        TrainingError: they differ for a text.
    """
    for (text, wanted), found in zip(expected, ids, strict=True):
        if list(found) != wanted:
            at = next(i for i, (one, other) in enumerate(zip_longest(wanted, found)) if one != other)
            raise TrainingError(
                f"{what}: of {text[:60]!r} token {at} is {list(found)[at : at + 3]}, and the model was trained on "
                f"{wanted[at : at + 3]}; nothing was written"
            )
    if not expected:
        return f"{what}: ids NOT compared, because decoding with this tokenizer does not give the texts of the rows"
    return f"{what}: ids equal for {len(expected)} of {len(expected)} texts"


def check_tokenizer(folder: Path, rows: Rows, tokenizer: Any) -> list[str]:
    """Compare the tokenizer in a written folder with ``tokenizer``, which was written, and with what was trained on.

    Raises:
        TrainingError: ids or template differ, or a template would make chats of the plain texts of a head.
    """
    from transformers import AutoTokenizer

    opened = AutoTokenizer.from_pretrained(folder)
    if opened.chat_template != tokenizer.chat_template or (rows.text_form != "chat" and opened.chat_template):
        raise TrainingError(f"{folder} has another chat template than the model; nothing was written")
    expected = texts_of(rows, tokenizer) + rendered(tokenizer)
    return [check_ids("tokenizer, opened again", expected, [encode(opened, text) for text, _ in expected])]


def check_folder(
    folder: Path,
    model: Any,
    rows: Rows,
    tokenizer: Any,
    reference: Scores,
    bound: float,
    adapter_change: float | None = None,
) -> list[str]:
    """Compare a written folder with what was written.

    Args:
        model: as plain transformers opened it.
        tokenizer: the one that was written.
        reference: the scores of the model that was written.
        bound: see ``check_change``.
        adapter_change: see ``check_change``.

    Returns:
        Lines for the user.

    Raises:
        TrainingError: ids differ, or answers by more than ``bound``.
    """
    lines = check_tokenizer(folder, rows, tokenizer)
    found = score(model, rows)
    change = change_between(reference, found, head_of(model.config) != "lm")
    fix = "--dtype float32 rounds less; " if adapter_change is not None and model.dtype != torch.float32 else ""
    lines += [check_change(f"model, opened again in {str(model.dtype)[6:]}", change, bound, adapter_change, fix)]
    return [*lines, f"    compared on {rows.origin}"]
