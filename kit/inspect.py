"""What a model would really be trained on: samples as they are tokenised, with what is learned from marked.

``look`` gathers everything from the very data a run would open; ``as_text`` and ``as_page`` show the same.
"""

import html
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from tokenizers.decoders import DecodeStream

from kit.config import Recipe
from kit.feed import Feed
from kit.page import page, section, svg, table
from kit.samples import Samples, duplicates

MAX_TOKENS_SHOWN = 4000  # of one sample
NUM_PLACES = 5
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Token:
    text: str
    weight: float  # in the loss; 0: not learned from
    is_special: bool


@dataclass(frozen=True)
class Shown:
    """One sample."""

    place: str
    source: str
    tokens: list[Token]
    num_tokens: int
    num_learned: int


@dataclass
class Look:
    """Everything that is shown of a data set."""

    title: str
    notes: list[str]
    sources: list[dict[str, Any]]  # a row of the table for each
    checks: list[tuple[bool, str]]  # whether it is as it should be, and what
    lengths: np.ndarray  # int [N], tokens
    max_length: int
    samples: list[Shown] = field(default_factory=list)


class _Alone:
    """The rank of a look: one process of one."""

    process_index, num_processes = 0, 1


def look(recipe: Recipe, tokenizer: Any, data: Any, num_samples: int) -> Look:
    """Gather what ``kit inspect`` shows.

    Args:
        data: what ``open_data`` gave.
        num_samples: samples to show, spread evenly over the data; at least one of each source.
    """
    train: Samples = data.train
    feed = Feed(train, data.order, recipe, _Alone(), 0, num_steps=0)
    title = ", ".join(store.source.name for store in train.stores)
    notes = [*data.notes, *feed.notes(), f"{data.total_steps(recipe)} steps of {recipe.global_batch_size}"]
    gathered = Look(
        title, notes, _sources(train), _checks(train, data.evaluation, tokenizer), train.lengths, recipe.max_length
    )
    chosen = set(np.linspace(0, len(train) - 1, num_samples).round().astype(int).tolist()) if num_samples else set()
    if num_samples:
        chosen |= {int(np.flatnonzero(train.sources == i)[0]) for i in set(train.sources.tolist())}
    gathered.samples = [_shown(train, i, tokenizer) for i in sorted(chosen)]
    return gathered


def _sources(train: Samples) -> list[dict[str, Any]]:
    rows = []
    for number, store in enumerate(train.stores):
        of_source = train.sources == number
        lengths, num_targets = train.lengths[of_source], train.num_targets[of_source]
        counts = store.info["counts"]
        rows.append(
            {
                "data set": store.name,
                "rows": counts.get("num_rows", 0),
                "samples": int(of_source.sum()),
                "tokens": int(lengths.sum(dtype=np.int64)),
                "learned": f"{num_targets.sum() / lengths.sum():.1%}",
                "median length": int(np.median(lengths)),
                "longest": int(lengths.max()),
                "cut": counts.get("num_truncated", 0) + counts.get("num_split", 0),
                "left out": counts.get("num_dropped_long", 0) + counts.get("num_dropped_unsupervised", 0),
                "blank lines": counts.get("num_blank_lines", 0),
            }
        )
    return rows


def _checks(train: Samples, evaluation: Samples | None, tokenizer: Any) -> list[tuple[bool, str]]:
    """What commonly goes wrong, looked for in the ids themselves."""
    firsts, seconds, lasts = Counter[int](), 0, Counter[int]()
    looked_at = np.linspace(0, len(train) - 1, min(len(train), 10_000)).round().astype(int)
    bos = tokenizer.bos_token_id
    for i in looked_at.tolist():
        ids, weights = train[i]
        firsts[int(ids[0])] += 1
        seconds += bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos
        lasts[int(ids[np.flatnonzero(weights)[-1]])] += 1
    num = len(looked_at)
    checks = []
    if bos is not None:
        share = firsts[bos] / num
        checks.append((share in (0.0, 1.0), f"{share:.1%} of the samples begin with {tokenizer.bos_token}"))
        checks.append((seconds == 0, f"{seconds} begin with it twice"))
    special = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
    ends = sum(count for id_, count in lasts.items() if id_ in special) / num
    common = [(tokenizer.convert_ids_to_tokens(id_), count / num) for id_, count in lasts.most_common(3)]
    named = ", ".join(f"{token!r} {share:.1%}" for token, share in common)
    checks.append((ends > 0.99, f"{ends:.1%} of the samples teach to stop; the last token learned is {named}"))
    ids_hash, counts = np.unique(train.hashes("ids_hash"), return_counts=True)
    twice = int((counts - 1).sum())
    where = ""
    if twice:
        again = np.flatnonzero(np.isin(train.hashes("ids_hash"), ids_hash[counts > 1]))[:NUM_PLACES]
        where = f": {', '.join(train.place(int(i)) for i in again)}" + (" ..." if twice > NUM_PLACES else "")
    checks.append((twice == 0, f"{twice} samples stand in the training data more than once{where}"))
    if evaluation is not None:
        exact, similar = duplicates(evaluation, train)
        found = f"{exact + similar} of {len(evaluation)} evaluation samples are in the training data"
        checks.append((exact + similar == 0, f"{found} ({exact} token for token)"))
    return checks


def _shown(train: Samples, i: int, tokenizer: Any) -> Shown:
    ids, weights = train[i]
    tokens = tokens_of(ids[:MAX_TOKENS_SHOWN], weights, tokenizer)
    return Shown(train.place(i), train.names[train.sources[i]], tokens, len(ids), int(train.num_targets[i]))


def tokens_of(ids: np.ndarray, weights: np.ndarray, tokenizer: Any) -> list[Token]:
    """Texts that add up to the decoded sample; where a character takes several tokens they are shown as one."""
    special = set(tokenizer.all_special_ids) | {
        id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    stream = DecodeStream(skip_special_tokens=False)
    tokens = []
    for id_, weight in zip(ids.tolist(), weights.tolist(), strict=False):
        text = stream.step(tokenizer.backend_tokenizer, id_)
        if text is not None:
            tokens.append(Token(text, weight, id_ in special))
    return tokens


def runs_of(tokens: list[Token]) -> list[list[Token]]:
    """Neighbours of equal weight together."""
    runs: list[list[Token]] = []
    for token in tokens:
        if runs and runs[-1][-1].weight == token.weight:
            runs[-1].append(token)
        else:
            runs.append([token])
    return runs


def histogram(lengths: np.ndarray, max_length: int, num_bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts [bins] and edges [bins + 1] in tokens, from 0 to the longest sample or ``max_length``."""
    return np.histogram(lengths, bins=num_bins, range=(0, max(int(lengths.max()), 1)))


def as_text(gathered: Look, colour: bool) -> str:
    """For a terminal. What is learned is green, or stands in ``[[ ]]`` without ``colour``; special tokens are dim."""
    lines = [gathered.title, *(f"  {note}" for note in gathered.notes), ""]
    lines += [f"  {'ok  ' if fine else 'LOOK'}  {text}" for fine, text in gathered.checks]
    counts, edges = histogram(gathered.lengths, gathered.max_length, 48)
    bars = "".join(BARS[round(c / counts.max() * (len(BARS) - 1))] if c else " " for c in counts)
    lines += ["", f"  lengths, 0 to {edges[-1]:.0f} tokens (max_length {gathered.max_length})", f"  {bars}", ""]
    lines += _text_table(gathered.sources)
    for sample in gathered.samples:
        share = sample.num_learned / sample.num_tokens
        lines += ["", f"--- {sample.place}: {sample.num_tokens} tokens, {sample.num_learned} learned ({share:.0%})"]
        lines.append("".join(_text_run(run, colour) for run in runs_of(sample.tokens)))
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


def _text_table(rows: list[dict[str, Any]]) -> list[str]:
    cells = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


STYLE = """
p.line { margin: .15rem 0 }
.sample { border: 1px solid #d0d7de; border-radius: 6px; padding: .75rem; margin: .75rem 0 }
.sample h3 { font-size: .95rem; margin: 0 0 .5rem } .sample h3 small { font-weight: normal; color: #57606a }
.run { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; padding: .1rem .4rem;
border-left: 3px solid #d0d7de; color: #57606a; margin: 2px 0 } .run.learned { border-color: #1a7f37; color: #1f2328;
background: #dafbe1 } .run small { float: right; font: 11px/1.6 system-ui; color: #57606a; margin-left: .5rem }
.run i { font-style: normal; background: #ddf4ff; border-radius: 3px; color: #0550ae } .run b { font-weight: normal }
.run b:hover { outline: 1px solid #0969da } ul.checks { list-style: none; padding: 0 }
ul.checks li { padding: .1rem 0 .1rem 1.5rem }
ul.checks li::before { content: "✓"; color: #1a7f37; float: left; margin-left: -1.5rem;
font-weight: bold }
ul.checks li.look::before { content: "!"; color: #9a6700 } .legend .run { display: inline-block }
@media (prefers-color-scheme: dark) { body { background: #0d1117; color: #e6edf3 }
td, th, .sample { border-color: #30363d }
.run { color: #8b949e; border-color: #30363d }
.run.learned { background: #12261e; color: #e6edf3; border-color: #3fb950 }
.run i { background: #121d2f; color: #79c0ff } .sample h3 small, .run small, p.line { color: #8b949e }
.chart { background: #fff; border-radius: 6px } }
"""


def as_page(gathered: Look) -> str:
    """One HTML file that needs no network."""
    checks = "".join(f"<li{'' if fine else ' class=look'}>{html.escape(text)}</li>" for fine, text in gathered.checks)
    legend = "<p class=legend><span class='run learned'>learned from</span> <span class=run>read only</span> "
    legend += "<span class=run><i>special token</i></span></p>"
    parts = [
        f"<h1>{html.escape(gathered.title)}</h1>",
        "".join(f"<p class=line>{html.escape(note)}</p>" for note in gathered.notes),
        f"<h2>Checks</h2><ul class=checks>{checks}</ul>",
        section("Data sets", table(list(gathered.sources[0]), gathered.sources)),
        section("Lengths", f"<div class=chart>{_chart(gathered)}</div>"),
        f"<h2>Samples</h2>{legend}",
        *(_page_sample(sample) for sample in gathered.samples),
    ]
    return page(f"{gathered.title}: what is learned from", parts, STYLE)


def _page_sample(sample: Shown) -> str:
    share = sample.num_learned / sample.num_tokens
    about = f"{sample.num_tokens} tokens, {sample.num_learned} learned ({share:.0%})"
    more = sample.num_tokens - len(sample.tokens) if sample.num_tokens > MAX_TOKENS_SHOWN else 0
    runs = "".join(_page_run(run) for run in runs_of(sample.tokens))
    end = f"<p class=line>{more} tokens more</p>" if more else ""
    return f"<div class=sample><h3>{html.escape(sample.place)} <small>{about}</small></h3>{runs}{end}</div>"


def _page_run(run: list[Token]) -> str:
    weight = run[0].weight
    tokens = "".join(f"<{tag}>{html.escape(t.text)}</{tag}>" for t in run for tag in ["i" if t.is_special else "b"])
    extra = f", weight {weight:g}" if weight not in (0.0, 1.0) else ""
    return f"<div class='run{' learned' if weight else ''}'><small>{len(run)}{extra}</small>{tokens}</div>"


def _chart(gathered: Look) -> str:
    figure = Figure(figsize=(6, 2.4), layout="constrained")
    axes = figure.subplots()
    counts, edges = histogram(gathered.lengths, gathered.max_length, 60)
    axes.bar(edges[:-1], counts, width=np.diff(edges), align="edge", color="#0969da")
    if gathered.max_length <= edges[-1]:
        axes.axvline(gathered.max_length, color="#cf222e", linewidth=1, label="max_length")
        axes.legend(fontsize=8)
    axes.set_xlabel(f"tokens in a sample (max_length {gathered.max_length})", fontsize=9)
    axes.set_ylabel("samples", fontsize=9)
    axes.tick_params(labelsize=8)
    return svg(figure)
