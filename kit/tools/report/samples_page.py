"""Show training samples token by token, with the supervised tokens marked.

``gather_samples`` gathers the content from the same data that a run would open. ``as_text`` and ``as_page`` show it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from kit.config.recipe import Recipe
from kit.data.feed.data import Data
from kit.data.feed.data_ranks import Ranks
from kit.data.samples.bad_rows import NOT_USED
from kit.system.visible import one_line
from kit.tools.report.data_checks import LEAK, Finding, check
from kit.tools.report.page import escaped, page
from kit.tools.report.shown_samples import Part, ShownSample, Token, shown_samples


@dataclass
class GatheredSamples:
    """What ``kit inspect`` shows of the data of a run."""

    title: str
    notes: list[str]
    checks: list[Finding]
    samples: list[ShownSample]
    are_prompts: bool  # for rollouts: the marked answer is the ground truth, not a training target


def gather_samples(
    recipe: Recipe, tokenizer: Any, data: Data, notes: Sequence[str], num_samples: int
) -> GatheredSamples:
    """Gather what ``kit inspect`` shows.

    Args:
        data: not a stream.
        notes: lines for the user, those of ``data`` included.
        num_samples: number of samples spread evenly over the data; see ``shown_samples``.
    """
    train = data.train
    lines = [note for note in notes if LEAK not in note and NOT_USED not in note]  # these are shown as a whole
    for number, store in enumerate(train.stores):
        lengths = train.row_lengths[train.dataset_ids == number]  # of a pair that of its longer half
        about = f"{len(lengths):,} samples, median length {int(np.median(lengths)):,} tokens"
        lines.append(f"{store.name}: {about}, longest {lengths.max():,}")
        unused = ", ".join(f"{name} ({share:.1%} of the rows)" for name, share in store.unused.items())
        lines += [f"{store.name}{NOT_USED}{unused}"] if unused else []
    lines += [] if recipe.rolls_out else data.open_feed(recipe, Ranks(), 0, {}).notes()
    lines.append(f"{data.total_steps(recipe):,} steps of {recipe.global_batch_size // recipe.answers_per_prompt:,}")
    return GatheredSamples(
        ", ".join(train.dataset_names),
        lines,
        check(train, data.evaluation, tokenizer, recipe, recipe.rolls_out),
        shown_samples(train, tokenizer, num_samples, recipe.rolls_out),
        recipe.rolls_out,
    )


def as_text(gathered: GatheredSamples, colour: bool) -> str:
    """Return the text for a terminal.

    Supervised tokens are green, or in ``[[ ]]`` without ``colour``; red in a rejected answer.
    """
    lines = [gathered.title, *(f"  {note}" for note in gathered.notes), ""]
    lines += [f"  {'ok  ' if is_ok else 'LOOK'}  {text}" for is_ok, text in gathered.checks]
    lines = [*map(one_line, lines)]
    for sample in gathered.samples:
        lines += ["", f"--- {one_line(sample.origin)}: {one_line(sample.about)}"]
        for part in sample.parts:
            text = "".join(_text_of(run, part, colour) for run in _runs(part))
            lines += [f"  {part.name}:", text] if part.name else [text]
    return "\n".join(lines)


def _runs(part: Part) -> Iterator[list[Token]]:
    """Consecutive tokens of equal weight."""
    return (list(run) for _, run in groupby(part.tokens, lambda token: token.weight))


def _weight(token: Token) -> str:
    return f" x{token.weight:g}" if token.weight not in (0.0, 1.0) else ""


def _text_of(run: list[Token], part: Part, colour: bool) -> str:
    text, weight = "".join(token.text for token in run), run[0].weight
    if not weight:
        return text
    return (
        f"\033[{31 if part.is_bad else 32}m{text}{_weight(run[0])}\033[0m" if colour else f"[[{text}]]{_weight(run[0])}"
    )


def as_page(gathered: GatheredSamples) -> str:
    """Return the HTML page, in one file that needs no network."""
    checks = (f"<li class={'ok' if is_ok else 'look'}>{escaped(text)}</li>" for is_ok, text in gathered.checks)
    mark = "expected answer" if gathered.are_prompts else "supervised"
    legend = (
        f"<p class=tokens><span class=supervised>{mark}</span> <span class='supervised bad'>rejected</span>"
        " <span>masked</span> <span class=special>special token</span></p>"
    )
    parts = [
        f"<h1>{escaped(gathered.title)}</h1>",
        *(f"<p class=line>{escaped(note)}</p>" for note in gathered.notes),
        f"<h2>Checks</h2><ul class=checks>{''.join(checks)}</ul>",
        f"<h2>Samples</h2>{legend}",
        *map(_page_sample, gathered.samples),
    ]
    return page(f"{gathered.title}: samples", parts)


def _page_sample(sample: ShownSample) -> str:
    parts = ""
    for part in sample.parts:
        name = f"<h4>{escaped(part.name)}</h4>" if part.name else ""
        parts += f"{name}<div class=tokens>{''.join(_page_run(run, part) for run in _runs(part))}</div>"
    head = f"<h3>{escaped(sample.origin)} <small>{escaped(sample.about)}</small></h3>"
    return f"<div class=sample>{head}{parts}</div>"


def _page_run(run: list[Token], part: Part) -> str:
    first = run[0]
    style = ("supervised bad" if part.is_bad else "supervised") if first.weight else ""
    tokens = ""
    for token in run:
        tokens += f"<b{' class=special' if token.is_special else ''}>{escaped(token.text)}</b>" if token.text else ""
        tokens += f"<img src='{token.picture}' alt='{escaped(token.text)}'>" if token.picture else ""
    return f"<span class='{style}'>{tokens}<small>{_weight(first)}</small></span>"
