"""Show what a model would be trained on: samples as tokens, with the supervised tokens marked.

``gather_samples`` gathers the content from the same data that a run would open. ``as_text`` and ``as_page`` show it.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tokenizers.decoders import DecodeStream

from kit.config.recipe import Recipe
from kit.data.feed.ranks import Ranks
from kit.data.samples.samples import NOT_USED, Samples
from kit.secrets import secret_spans
from kit.tools.report.bars import histogram_svg
from kit.tools.report.data_checks import LEAK, Finding, Verdict, check, counted
from kit.tools.report.data_tables import datasets_table, text_table, unused_table
from kit.tools.report.page import escaped, page, section, table
from kit.visible import one_line, visible

MAX_TOKENS_SHOWN = 4000  # of one sample
BARS = "▁▂▃▄▅▆▇█"
MARKS: dict[Verdict, str] = {"ok": "ok", "look": "LOOK", "note": ""}
MARK_CLASSES: dict[Verdict, str] = {"ok": "", "look": " class=look", "note": " class=known"}
PLAIN_NUMBER = re.compile(r"(?<!\S)\d{4,}(?= (of|samples|tokens|packs|blank|left)\b)")  # not a year, not part of a name


@dataclass(frozen=True)
class Token:
    """A token as it is shown."""

    text: str  # empty if more tokens are needed to complete a character
    weight: float  # in the loss; 0: not supervised
    is_special: bool


@dataclass(frozen=True)
class ShownSample:
    """A sample as it is shown."""

    origin: str  # ``file:line``
    tokens: list[Token]  # the first MAX_TOKENS_SHOWN tokens
    num_tokens: int  # of the whole sample
    num_learned: int  # supervised tokens of the whole sample

    @property
    def about(self) -> str:
        """Its numbers of tokens, as text."""
        share = f"{self.num_learned / self.num_tokens:.0%}"
        return f"{counted(self.num_tokens, 'token')}, {self.num_learned:,} learned ({share})"

    @property
    def more(self) -> str:
        """How many tokens are not shown, as text; empty if all are shown."""
        num = self.num_tokens - len(self.tokens)
        return counted(num, "more token") if num else ""


@dataclass
class GatheredSamples:
    """What ``kit inspect`` shows of the data of a run."""

    title: str
    notes: list[str]
    datasets: list[dict[str, Any]]  # the table of the data sets, a row for each
    unused: list[dict[str, Any]]  # columns, and keys of messages, that are not read; a row for each
    checks: list[Finding]
    lengths: np.ndarray  # int [N], tokens of each sample
    max_length: int  # tokens
    samples: list[ShownSample]


def gather_samples(
    recipe: Recipe, tokenizer: Any, data: Any, notes: Sequence[str], num_samples: int
) -> GatheredSamples:
    """Gather what ``kit inspect`` shows.

    Args:
        data: as ``open_data`` returned it.
        notes: lines for the user, those of ``data`` included.
        num_samples: number of samples to show, spread evenly over the data. No sample is shown twice. Unless it is 0,
            at least one sample of each data set is shown, even if that makes more than ``num_samples``.
    """
    train: Samples = data.train
    feed = data.open_feed(recipe, Ranks(), 0, {})
    lines = [store.source.name for store in train.stores if store.source.name != store.name]
    lines += [note for note in notes if LEAK not in note and NOT_USED not in note]  # these are shown apart
    lines += [*feed.notes(), f"{counted(data.total_steps(recipe), 'step')} of {recipe.global_batch_size:,}"]
    return GatheredSamples(
        ", ".join(train.dataset_names),
        [PLAIN_NUMBER.sub(lambda match: f"{int(match[0]):,}", line) for line in lines],
        datasets_table(train, data.evaluation if recipe.eval_split_size else None),
        unused_table(train),
        check(train, data.evaluation, tokenizer, recipe),
        train.lengths,
        recipe.max_length,
        [_shown(train, i, tokenizer) for i in _choice(train.dataset_ids, num_samples)],
    )


def _choice(dataset_ids: np.ndarray, num: int) -> list[int]:
    """Choose ``num`` samples, spread evenly, with at least one of each data set. Returns their indices."""
    chosen: list[int] = np.linspace(0, len(dataset_ids) - 1, min(num, len(dataset_ids))).round().astype(int).tolist()
    present, firsts = np.unique(dataset_ids, return_index=True)
    for dataset_id, first in zip(present, firsts.tolist(), strict=True):
        of_dataset = Counter(int(dataset_ids[i]) for i in chosen)
        if chosen and not of_dataset[dataset_id]:
            most, times = of_dataset.most_common(1)[0]
            if times > 1:
                chosen.remove(max(i for i in chosen if dataset_ids[i] == most))
            chosen.append(first)
    return sorted(chosen)


def _shown(train: Samples, i: int, tokenizer: Any) -> ShownSample:
    ids, weights = train[i]
    weights[0] = 0  # the first token has no token before it that predicts it
    tokens = tokens_of(ids[:MAX_TOKENS_SHOWN], weights, tokenizer)
    return ShownSample(train.origin(i), tokens, len(ids), int(train.num_targets[i]))


def tokens_of(ids: np.ndarray, weights: np.ndarray, tokenizer: Any) -> list[Token]:
    """Decode token by token.

    The texts of the tokens, joined, are the decoded sample with its control characters made visible. If a character
    consists of several tokens, the last of them has it as its text.

    Args:
        ids: [T].
        weights: [T] or longer, of each token in the loss.
    """
    special = set(tokenizer.all_special_ids) | {
        id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    stream = DecodeStream(skip_special_tokens=False)
    tokens, text = [], None
    for id_, weight in zip(ids.tolist(), weights.tolist(), strict=False):
        text = stream.step(tokenizer.backend_tokenizer, id_)
        tokens.append(Token(visible(text or ""), weight, id_ in special))
    if text is None and tokens:  # the sample was cut within a character
        tokens[-1] = replace(tokens[-1], text="\ufffd")
    return _without_secrets(tokens)


def _without_secrets(tokens: list[Token]) -> list[Token]:
    """Replace tokens that spell a credential by ``***``. On the page it could not be found, as tokens are separate."""
    ends = np.cumsum([len(token.text) for token in tokens])
    for start, end in secret_spans("".join(token.text for token in tokens)):
        first, last = (int(i) for i in np.searchsorted(ends, [start, end - 1], side="right"))
        for i in range(first, last + 1):
            tokens[i] = replace(tokens[i], text="***" if i == first else "")
    return tokens


def runs_of(tokens: list[Token]) -> list[list[Token]]:
    """Group consecutive tokens of equal weight."""
    runs: list[list[Token]] = []
    for token in tokens:
        if runs and runs[-1][-1].weight == token.weight:
            runs[-1].append(token)
        else:
            runs.append([token])
    return runs


def histogram(lengths: np.ndarray, num_bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Return counts [num_bins] and edges [num_bins + 1] in tokens, from 0 to the longest sample."""
    return np.histogram(lengths, bins=num_bins, range=(0, max(int(lengths.max()), 1)))


def as_text(gathered: GatheredSamples, colour: bool) -> str:
    """Return the text for a terminal.

    Supervised tokens are green, or in ``[[ ]]`` without ``colour``. Special tokens are dim.
    """
    lines = [gathered.title, *(f"  {note}" for note in gathered.notes), ""]
    lines += [f"  {MARKS[verdict]:<4}  {text}" for verdict, text in gathered.checks]
    counts, edges = histogram(gathered.lengths, 48)
    bars = "".join(BARS[round(c / counts.max() * (len(BARS) - 1))] if c else " " for c in counts)
    lines += ["", f"  lengths, 0 to {edges[-1]:,.0f} tokens (max_length {gathered.max_length:,})", f"  {bars}", ""]
    lines = [*map(one_line, lines), *text_table(gathered.datasets)]
    lines += ["", *text_table(gathered.unused)] if gathered.unused else []
    for sample in gathered.samples:
        lines += ["", f"--- {one_line(sample.origin)}: {sample.about}"]
        lines.append("".join(_text_run(run, colour) for run in runs_of(sample.tokens)))
        lines += [f"... {sample.more}"] if sample.more else []
    return "\n".join(lines)


def _text_run(run: list[Token], colour: bool) -> str:
    learned = run[0].weight > 0
    mark = f" x{run[0].weight:g}" if run[0].weight not in (0.0, 1.0) else ""
    if not colour:
        text = "".join(token.text for token in run)
        return f"[[{text}]]{mark}" if learned else text
    start = "\033[32m" if learned else ""
    text = "".join(f"\033[2m{t.text}\033[22m" if t.is_special else t.text for t in run)
    return f"{start}{text}{mark}\033[0m"


STYLE = """
.sample { border: 1px solid var(--edge); border-radius: 6px; padding: .75rem; margin: .75rem 0 }
.sample h3 { font-size: .95rem; margin: 0 0 .5rem } .sample h3 small { font-weight: normal }
.run { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; padding: .1rem .4rem;
border-left: 3px solid var(--edge); color: var(--soft); margin: 2px 0 } .run.learned { border-color: var(--good);
color: var(--text); background: light-dark(#dafbe1, #12261e) }
.run small { float: right; font: 11px/1.6 system-ui; margin-left: .5rem }
.run i { font-style: normal; background: light-dark(#ddf4ff, #121d2f); border-radius: 3px; color: light-dark(#0550ae,
#79c0ff) } .run b { font-weight: normal }
.run b:hover { outline: 1px solid var(--c0) } ul.checks { list-style: none; padding: 0 }
ul.checks li { padding: .1rem 0 .1rem 1.5rem }
ul.checks li::before { content: "✓"; color: var(--good); float: left; margin-left: -1.5rem;
font-weight: bold }
ul.checks li.look::before { content: "!"; color: var(--warn) } ul.checks li.known::before { content: "·" }
.legend .run { display: inline-block } .chart svg { max-width: 36rem }
"""


def as_page(gathered: GatheredSamples) -> str:
    """Return the HTML page, in one file that needs no network."""
    checks = "".join(f"<li{MARK_CLASSES[verdict]}>{escaped(text)}</li>" for verdict, text in gathered.checks)
    legend = "<p class=legend><span class='run learned'>learned from</span> <span class=run>read only</span> "
    legend += "<span class=run><i>special token</i></span> <small>at the right: number of tokens</small></p>"
    parts = [
        f"<h1>{escaped(gathered.title)}</h1>",
        "".join(f"<p class=line>{escaped(note)}</p>" for note in gathered.notes),
        f"<h2>Checks</h2><ul class=checks>{checks}</ul>",
        section("Data sets", table(list(gathered.datasets[0]), gathered.datasets)),
        *([section("Not used", table(list(gathered.unused[0]), gathered.unused))] if gathered.unused else []),
        section("Lengths", f"<div class=chart>{_chart(gathered)}</div>"),
        f"<h2>Samples</h2>{legend}",
        *(_page_sample(sample) for sample in gathered.samples),
    ]
    return page(f"{gathered.title}: what is learned from", parts, STYLE)


def _page_sample(sample: ShownSample) -> str:
    runs = "".join(_page_run(run) for run in runs_of(sample.tokens))
    end = f"<p class=line>{sample.more}</p>" if sample.more else ""
    return f"<div class=sample><h3>{escaped(sample.origin)} <small>{sample.about}</small></h3>{runs}{end}</div>"


def _page_run(run: list[Token]) -> str:
    weight = run[0].weight
    tags = [("i" if token.is_special else "b", token.text) for token in run if token.text]
    tokens = "".join(f"<{tag}>{escaped(text)}</{tag}>" for tag, text in tags)
    extra = f", weight {weight:g}" if weight not in (0.0, 1.0) else ""
    return f"<div class='run{' learned' if weight else ''}'><small>{len(run):,}{extra}</small>{tokens}</div>"


def _chart(gathered: GatheredSamples) -> str:
    counts, edges = histogram(gathered.lengths, 60)
    title = f"samples by their tokens (max_length {gathered.max_length:,})"
    return histogram_svg(counts.tolist(), edges.tolist(), title, ("max_length", gathered.max_length))
