"""Show what a model would be trained on: samples as tokens, with the supervised tokens marked.

``gather_samples`` gathers the content from the same data that a run would open. ``as_text`` and ``as_page`` show it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from kit.config.recipe import Recipe
from kit.data.feed.ranks import Ranks
from kit.data.open import Data
from kit.data.samples.samples import NOT_USED
from kit.errors import Problem, UserError
from kit.tools.report.bars import histogram_svg
from kit.tools.report.data_checks import LEAK, Finding, Verdict, check, counted
from kit.tools.report.data_tables import datasets_table, text_table, unused_table
from kit.tools.report.page import escaped, page, section, table
from kit.tools.report.preference_checks import answer_lengths, check_preferences
from kit.tools.report.shown_samples import SPREAD, Reason, Shown, ShownAnswer, ShownSample, Token, more_tokens, runs_of
from kit.visible import one_line, visible

PER_REASON = 3  # samples for each thing that is counted
BAD = ("rejected", "label false")  # kinds of answers that are to become less likely
BARS = "▁▂▃▄▅▆▇█"
MARKS: dict[Verdict, str] = {"ok": "ok", "look": "LOOK", "note": ""}
MARK_CLASSES: dict[Verdict, str] = {"ok": "", "look": " class=look", "note": " class=known"}
PLAIN_NUMBER = re.compile(r"(?<!\S)\d{4,}(?= (of|samples|tokens|packs|blank|left)\b)")  # not a year, not part of a name


@dataclass
class GatheredSamples:
    """What ``kit inspect`` shows of the data of a run."""

    title: str
    notes: list[str]
    datasets: list[dict[str, Any]]  # the table of the data sets, a row for each
    unused: list[dict[str, Any]]  # columns, and keys of messages, that are not read; a row for each
    checks: list[Finding]
    lengths: np.ndarray  # int [N], tokens of each sample; of a pair, of the longer half
    answer_lengths: dict[str, np.ndarray]  # tokens of answers by their kind, of pairs and answers with a label
    max_length: int  # tokens
    shown: Shown

    @property
    def samples(self) -> list[ShownSample]:
        """Those spread over the data, in its order."""
        return self.shown.spread

    def with_reason(self, key: str) -> list[ShownSample]:
        """The samples that are shown for a reason, as many as wanted. Raises ``UserError`` if these data have none."""
        found = [sample for sample in self.shown.samples if key in sample.reasons]
        if not found:
            known = ", ".join(r.key for r in self.shown.reasons if self._num_shown(r.key))
            raise UserError(Problem("--show", f"{key}: no sample of these data", known))
        return found[: self.shown.per_reason]

    def _num_shown(self, key: str) -> int:
        return sum(key in sample.reasons for sample in self.shown.samples)

    def choices(self) -> list[tuple[Reason, str]]:
        """The reasons for which samples are shown, each with how many: ``3 of 924``."""
        found = []
        for reason in self.shown.reasons:
            num = self._num_shown(reason.key)
            of = f" of {reason.count:,}" if reason.count is not None and reason.count != num else ""
            if num or reason.count:
                found.append((reason, f"{num:,}{of}"))
        return found


def gather_samples(
    recipe: Recipe, tokenizer: Any, data: Data, notes: Sequence[str], num_samples: int, per_reason: int = PER_REASON
) -> GatheredSamples:
    """Gather what ``kit inspect`` shows.

    Args:
        data: not a stream.
        notes: lines for the user, those of ``data`` included.
        num_samples: number of samples to show, spread evenly over the data. No sample is shown twice. Unless it is 0,
            at least one sample of each data set is shown, even if that makes more than ``num_samples``.
        per_reason: number of samples for each thing that is counted, see ``Shown``.
    """
    train = data.train
    findings = [*check(train, data.evaluation, tokenizer, recipe), *check_preferences(train, recipe)]
    feed = data.open_feed(recipe, Ranks(), 0, {})
    lines = [store.source.name for store in train.stores if store.source.name != store.name]
    lines += [note for note in notes if LEAK not in note and NOT_USED not in note]  # these are shown apart
    lines += [*feed.notes(), f"{counted(data.total_steps(recipe), 'step')} of {recipe.global_batch_size:,}"]
    return GatheredSamples(
        ", ".join(train.dataset_names),
        [PLAIN_NUMBER.sub(lambda match: f"{int(match[0]):,}", line) for line in lines],
        datasets_table(train, data.evaluation if recipe.eval_split_size else None),
        unused_table(train),
        findings,
        train.row_lengths,
        {} if train.preferences is None else answer_lengths(train),
        recipe.max_length,
        Shown(data, tokenizer, num_samples, per_reason, findings),
    )


def histogram(lengths: np.ndarray, num_bins: int, longest: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return counts [num_bins] and edges [num_bins + 1] in tokens, from 0 to ``longest``; default: that of these."""
    return np.histogram(lengths, bins=num_bins, range=(0, max(longest or int(lengths.max()), 1)))


def as_text(gathered: GatheredSamples, colour: bool, show: str | None = None) -> str:
    """Return the text for a terminal.

    Supervised tokens are green, or in ``[[ ]]`` without ``colour``. Special tokens are dim, and what was cut off is
    struck out, or in ``{{ }}``. In the answers of a pair, what differs from the other one is bold and underlined, or in
    ``(( ))``. Answers that were rejected, or have the label false, are red.

    Args:
        show: key of the reason for which samples are shown; None: those spread over the data.

    Raises:
        UserError: no sample has this reason.
    """
    samples = gathered.with_reason(show) if show else gathered.samples
    lines = [gathered.title, *(f"  {note}" for note in gathered.notes), ""]
    lines += [f"  {MARKS[verdict]:<4}  {text}" for verdict, text, *_ in gathered.checks]
    title = "lengths, 0 to {:,} tokens (max_length " + f"{gathered.max_length:,})"
    lines += ["", *_text_histogram(gathered.lengths, int(gathered.lengths.max()), title), ""]
    longest = _longest(gathered.answer_lengths)
    for name, lengths in gathered.answer_lengths.items():
        title = f"answers, {name}: 0 to {{:,}} tokens, {lengths.mean():,.1f} on average"
        lines += [*_text_histogram(lengths, longest, title), ""]
    lines = [*map(one_line, lines), *text_table(gathered.datasets)]
    lines += ["", *text_table(gathered.unused)] if gathered.unused else []
    rows = [
        {
            "to see samples": f"--show {reason.key}",
            "what": reason.label,
            "of": "" if reason.count is None else reason.count,
        }
        for reason, _ in gathered.choices()
        if reason.key != SPREAD
    ]
    lines += ["", *text_table(rows, left=True), "  --html FILE writes a page with samples of each"]
    for sample in samples:
        lines += ["", f"--- {one_line(sample.origin)}: {sample.about}"]
        lines += [f"    {one_line(sample.remark)}"] if sample.remark else []
        lines += [visible(sample.row)] if sample.row else []
        lines += _text_tokens(sample, colour, is_bad=sample.label is False)
        for answer in sample.answers:
            lines += [f"  {answer.name}:", *_text_tokens(answer, colour, answer.name in BAD)]
    return "\n".join(lines)


def _text_histogram(lengths: np.ndarray, longest: int, title: str) -> list[str]:
    """Lines for a terminal: the title, with ``longest`` put in, and bars."""
    counts, _ = histogram(lengths, 48, longest)
    bars = "".join(BARS[round(c / counts.max() * (len(BARS) - 1))] if c else " " for c in counts)
    return [f"  {title.format(longest)}", f"  {bars}"]


def _longest(answer_lengths: Mapping[str, np.ndarray]) -> int:
    return max((int(lengths.max()) for lengths in answer_lengths.values()), default=0)


def _text_tokens(shown: ShownSample | ShownAnswer, colour: bool, is_bad: bool) -> list[str]:
    lines = ["".join(_text_run(run, colour, is_bad) for run in runs_of(shown.tokens))]
    return lines + ([f"... {more}"] if (more := more_tokens(shown)) else [])


def _text_run(run: list[Token], colour: bool, is_bad: bool) -> str:
    learned, is_cut = run[0].weight > 0, run[0].is_cut
    mark = f" x{run[0].weight:g}" if run[0].weight not in (0.0, 1.0) else ""
    hidden = f"\n... {counted(run[0].num_hidden, 'token')} ...\n" if run[0].num_hidden else ""
    if not colour:
        text = "".join(f"(({text}))" if differs else text for differs, text in _by_difference(run, colour))
        text = f"[[{text}]]{mark}" if learned else text
        return hidden + (f"{{{{{text}}}}}" if is_cut else text)
    start = "\033[9m" if is_cut else f"\033[{31 if is_bad else 32}m" if learned else ""
    parts = _by_difference(run, colour)
    text = "".join(f"\033[1;4m{text}\033[22;24m" if differs else text for differs, text in parts)
    return f"{hidden}{start}{text}{mark}\033[0m"


def _by_difference(run: list[Token], colour: bool) -> Iterator[tuple[bool, str]]:
    """Yield the texts of consecutive tokens that differ from the other answer, or do not, as a terminal shows them."""
    for differs, tokens in groupby(run, lambda token: token.differs):
        dims = colour and not differs  # bold and dim are one attribute of a terminal
        text = "".join(f"\033[2m{t.text}\033[22m" if t.is_special and dims else t.text for t in tokens)
        if text:
            yield differs, text


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
.run.cut { border-left-style: dashed; text-decoration: line-through var(--edge) }
.remark { margin: 0 0 .5rem } .reason { font: 12px/1.5 system-ui; border: 1px solid var(--edge); border-radius: 1rem;
padding: .05rem .5rem; margin-right: .35rem; color: var(--soft); font-weight: normal; white-space: nowrap }
.answers { display: grid; grid-template-columns: 1fr 1fr; gap: .2rem 1rem; margin-top: .35rem }
.answers h4 { font-size: .85rem; margin: .2rem 0 } .answers small { font-weight: normal }
.run.bad { border-color: var(--c4); background: light-dark(#ffebe9, #25171c) }
.run mark { color: inherit; background: light-dark(#fff1a8, #5c4a05); border-radius: 3px; padding: .1rem 0;
text-decoration: underline }
.lengths { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: .5rem 1.5rem }
@media screen and (max-width: 44rem) { .answers { grid-template-columns: minmax(0, 1fr) } }
.choose { border: 1px solid var(--edge); border-radius: 6px; margin: .5rem 0; padding: .35rem .75rem .5rem;
display: flex; flex-wrap: wrap; gap: .25rem 1.1rem } .choose legend { color: var(--soft); padding: 0 .25rem }
.choose label { cursor: pointer; display: inline-flex; gap: .3rem; align-items: center }
"""


def as_page(gathered: GatheredSamples) -> str:
    """Return the HTML page, in one file that needs no network."""
    checks = "".join(f"<li{MARK_CLASSES[verdict]}>{escaped(text)}</li>" for verdict, text, *_ in gathered.checks)
    has_cut = any(token.is_cut for sample in gathered.shown.samples for token in sample.tokens)
    has_pairs = any(sample.answers for sample in gathered.shown.samples)
    legend = "<p class=legend>"
    for name in gathered.answer_lengths or ["learned from"]:
        legend += f"<span class='run learned{' bad' if name in BAD else ''}'>{name}</span> "
    legend += "<span class=run><mark>differs</mark></span> " if has_pairs else ""
    legend += "<span class=run>read only</span> <span class=run><i>special token</i></span> "
    legend += "<span class='run cut'>cut off</span> " if has_cut else ""
    legend += "<small>at the right: number of tokens. Of each sample at most "
    legend += f"{counted(gathered.shown.num_tokens, 'token')} are shown.</small></p>"
    labels = {reason.key: reason.label for reason in gathered.shown.reasons}
    parts = [
        f"<h1>{escaped(gathered.title)}</h1>",
        "".join(f"<p class=line>{escaped(note)}</p>" for note in gathered.notes),
        f"<h2>Checks</h2><ul class=checks>{checks}</ul>",
        section("Data sets", table(list(gathered.datasets[0]), gathered.datasets)),
        *([section("Not used", table(list(gathered.unused[0]), gathered.unused))] if gathered.unused else []),
        section("Lengths", f"<div class=lengths>{_charts(gathered)}</div>"),
        f"<h2>Samples</h2>{_control(gathered)}{legend}",
        *(_page_sample(sample, labels) for sample in gathered.shown.samples),
    ]
    return page(f"{gathered.title}: what is learned from", parts, STYLE + _hiding(gathered))


def _control(gathered: GatheredSamples) -> str:
    """Radio buttons that choose the reason for which samples are shown."""
    choices = [("all", "all", f"{len(gathered.shown.samples):,}")]
    choices += [(reason.key, reason.label, num) for reason, num in gathered.choices()]
    buttons = (
        f"<label><input type=radio name=show id=show-{key}{' checked' if key == 'all' else ''}>"
        f"{escaped(label)} <small>{num}</small></label>"
        for key, label, num in choices
    )
    return f"<fieldset class='choose screen'><legend>show samples</legend>{''.join(buttons)}</fieldset>"


def _hiding(gathered: GatheredSamples) -> str:
    """CSS that hides the samples that were not chosen: the page needs no script for it."""
    keys = [reason.key for reason, _ in gathered.choices()]
    rules = (f":root:has(#show-{key}:checked) .sample:not(.for-{key})" for key in keys)
    return ",".join(rules) + "{display:none}" if keys else ""


def _page_sample(sample: ShownSample, labels: Mapping[str, str]) -> str:
    reasons = "".join(f"<span class=reason>{escaped(labels[key])}</span>" for key in sample.reasons if key != SPREAD)
    remark = f"<p class=remark>{reasons}{escaped(sample.remark)}</p>" if reasons or sample.remark else ""
    row = f"<pre class=row>{escaped(sample.row)}</pre>" if sample.row else ""
    head = f"<h3>{escaped(sample.origin)} <small>{sample.about}</small></h3>{remark}"
    answers = "".join(
        f"<div><h4>{answer.name} <small>{counted(answer.num_tokens, 'token')}</small></h4>"
        f"{_page_tokens(answer, answer.name in BAD)}</div>"
        for answer in sample.answers
    )
    beside = f"<div class=answers>{answers}</div>" if answers else ""
    classes = " ".join(["sample", *(f"for-{key}" for key in sample.reasons)])
    return f"<div class='{classes}'>{head}{row}{_page_tokens(sample, sample.label is False)}{beside}</div>"


def _page_tokens(shown: ShownSample | ShownAnswer, is_bad: bool) -> str:
    runs = "".join(_page_run(run, is_bad) for run in runs_of(shown.tokens))
    more = more_tokens(shown)
    return runs + (f"<p class=line>{more}</p>" if more else "")


def _page_run(run: list[Token], is_bad: bool) -> str:
    weight, is_cut = run[0].weight, run[0].is_cut
    tokens = ""
    for differs, part in groupby((token for token in run if token.text), lambda token: token.differs):
        tags = (("i" if token.is_special else "b", token.text) for token in part)
        text = "".join(f"<{tag}>{escaped(text)}</{tag}>" for tag, text in tags)
        tokens += f"<mark>{text}</mark>" if differs else text
    extra = f", weight {weight:g}" if weight not in (0.0, 1.0) else ""
    extra += ", would be learned" if weight and is_cut else ""
    kind = " cut" if is_cut else f" learned{' bad' if is_bad else ''}" if weight else ""
    hidden = f"<p class=line>... {counted(run[0].num_hidden, 'token')} ...</p>" if run[0].num_hidden else ""
    return f"{hidden}<div class='run{kind}'><small>{len(run):,}{extra}</small>{tokens}</div>"


def _charts(gathered: GatheredSamples) -> str:
    """Histograms: of the samples' lengths, and of the lengths of answers of each kind, these over the same tokens."""
    title = f"samples by their tokens (max_length {gathered.max_length:,})"
    charts = [_chart(gathered.lengths, 0, title, ("max_length", gathered.max_length))]
    longest = _longest(gathered.answer_lengths)
    for name, lengths in gathered.answer_lengths.items():
        mean = float(lengths.mean())
        charts.append(_chart(lengths, longest, f"answers by their tokens: {name}", (f"mean {mean:,.1f}", mean)))
    return "".join(f"<div class=chart>{chart}</div>" for chart in charts)


def _chart(lengths: np.ndarray, longest: int, title: str, line: tuple[str, float]) -> str:
    counts, edges = histogram(lengths, 60, longest)
    return histogram_svg(counts.tolist(), edges.tolist(), title, line)
