"""Chooses the columns of a data set to read. Pure.

Promise: a format is chosen only by the kit's own names, or by the user's mapping. Names that are well known elsewhere
are quoted by the message, as a mapping to type, and never guessed.
"""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence

from kit.config.settings.objective import Rows
from kit.data.chat.formats import FORMATS, IGNORE, Format
from kit.errors import Problem, UserError, did_you_mean, raise_if

# Names of columns that are well known elsewhere, for each field that they usually mean.
ALIASES = {
    "conversations": "conversation dialog dialogs chat chats turns",
    "instruction": "question query prompt problem input user human source article document",
    "input": "context",
    "output": "answer response completion solution reply assistant target summary highlights caption text",
    "images": "image img picture photo file_name image_path image_file",
    "text": "content document article body sentence code story",
    "chosen": "chosen_response response_chosen accepted preferred better winner response_j",
    "rejected": "rejected_response response_rejected dispreferred worse loser response_k",
    "completion": "messages conversations answer response output",
    "label": "kto_tag labels class category target intent",
    "query": "question sentence1 premise text1",
    "document": "passage sentence2 hypothesis text2 context",
    "anchor": "query question sentence1 premise",
    "positive": "answer document passage pos sentence2 entailment",
    "negative": "negatives hard_negative neg contradiction",
}
# Of each kind of rows an objective that learns from it, and from what.
OBJECTIVES: dict[Rows, str] = {
    "pairs": "--objective dpo learns from pairs of answers",
    "rated": "--objective kto learns from answers with a label",
    "answers": "--objective sft learns the answers",
    "labelled": "--objective classify learns the labels of texts",
    "contrasts": "--objective embed learns which texts belong to each other",
    "compared": "--objective reward learns which of two texts is better",
}


def columns_flag(columns: Mapping[str, str]) -> str:
    """Return ``--dataset_columns`` with this mapping, their column to our field; as JSON if a name has separators."""
    text = ",".join(f"{theirs}={ours}" for theirs, ours in columns.items())
    if any("," in name or "=" in name for name in columns):
        text = json.dumps(dict(columns), ensure_ascii=False)
    return f"--dataset_columns {shlex.quote(text)}"


def choose_fields(
    columns: Sequence[str],
    mapping: Mapping[str, str],
    name: str,
    may_lack: bool = False,
    wanted: Rows = "answers",
) -> dict[str, str]:
    """Choose a format by the columns of a data set: ``{"prompt": "question", "completion": "answer"}``.

    The result maps each of our fields to their column. If the columns allow several formats, the one with most fields
    of ``mapping`` is taken, and of equals the first of ``FORMATS``.

    Args:
        columns: the columns of the data set.
        mapping: the recipe's ``dataset_columns``, their column to our field. What it maps to ``IGNORE`` is absent.
        name: the data set's, for messages.
        may_lack: ``mapping`` was written for another data set (the training data, while this one is for evaluation):
            columns that this one lacks are ignored if it has a complete format without them.
        wanted: what the rows must hold for the objective.

    Raises ``UserError`` if no format fits, or if ``mapping`` names an unknown field or a column that is not there.
    """
    ignored = {theirs for theirs, ours in mapping.items() if ours == IGNORE}
    columns = [column for column in columns if column not in ignored]
    mapping = {theirs: ours for theirs, ours in mapping.items() if theirs not in ignored}
    if may_lack:
        present = {theirs: ours for theirs, ours in mapping.items() if theirs in columns}
        if any(set(present.values()) <= set(fields) for fields in _complete(columns, present, ignored, wanted)):
            mapping = present
    raise_if(_problems_of_mapping(columns, mapping, name, wanted))
    complete = _complete(columns, mapping, ignored, wanted)
    if not complete:
        formats = ", or ".join(map(str, formats_of(wanted)))
        raise UserError(Problem(name, f"columns {', '.join(columns)}", formats, _next_step(columns, ignored, wanted)))
    fields = complete[0]
    for theirs, ours in mapping.items():
        if ours not in fields:
            found = f"{ours} does not go with {' and '.join(fields)}"
            fix = "leave it out"
            if ours == "images" and "text" in fields:
                fix = f"{columns_flag({theirs: ours, fields['text']: 'output'})}: the text is the answer to the picture"
            raise UserError(Problem(f"dataset_columns {theirs}={ours}", found, "fields of one format", fix))
    return fields


def _problems_of_mapping(columns: Sequence[str], mapping: Mapping[str, str], name: str, wanted: Rows) -> list[Problem]:
    """What is wrong with a mapping by itself."""
    problems: list[Problem] = []
    known = tuple(dict.fromkeys(field for format in formats_of(wanted) for field in format.fields))
    for theirs, ours in mapping.items():
        where = f"dataset_columns {theirs}={ours}"
        if ours not in known:
            expected = ", ".join((*known, IGNORE))
            problems.append(Problem(where, f"{ours!r} is no field", expected, did_you_mean(ours, known)))
        elif list(mapping.values()).count(ours) > 1:
            problems.append(Problem(where, f"{ours} is given twice", "one column for each field"))
        if theirs not in columns:
            found, expected = f"{name} has no column {theirs!r}", "one of " + ", ".join(columns)
            problems.append(Problem(where, found, expected, did_you_mean(theirs, columns)))
    return problems


def formats_of(wanted: Rows) -> list[Format]:
    """Return the formats whose rows hold what is ``wanted``, in their order of precedence."""
    return [format for format in FORMATS if format.rows == wanted]


def _complete(
    columns: Sequence[str], mapping: Mapping[str, str], ignored: Iterable[str], wanted: Rows
) -> list[dict[str, str]]:
    """The formats whose columns are all there, best first, each as our fields to their columns."""
    present = {name: name for name in columns if name not in mapping}
    present |= {ours: theirs for theirs, ours in mapping.items()}
    complete = []
    for format in formats_of(wanted):
        if all(column in present for column in format.columns):
            # Later rows may have an optional column that the first row lacks.
            later = {name: name for name in format.optional if name not in mapping and name not in ignored}
            theirs_of = later | present
            complete.append({ours: theirs_of[ours] for ours in format.fields if ours in theirs_of})
    return sorted(complete, key=lambda fields: -sum(field in fields for field in mapping.values()))


def _next_step(columns: Sequence[str], ignored: set[str], wanted: Rows) -> str:
    """What to do about columns that are no format, by their names alone: a mapping, or another objective."""
    for format in formats_of(wanted):
        mapping: dict[str, str] = {}  # their column to our field
        for ours in format.fields:
            names = [ours, *ALIASES.get(ours, "").split()]
            found = next((each for each in columns if each.lower() in names and each not in mapping), None)
            mapping |= {found: ours} if found else {}
        if set(format.columns) <= set(mapping.values()):
            return columns_flag(mapping | dict.fromkeys(sorted(ignored), IGNORE))
    num_read = {
        kind: max((len({*fields.values()} & {*columns}) for fields in _complete(columns, {}, ignored, kind)), default=0)
        for kind in OBJECTIVES
        if kind != wanted
    }
    kind = max(num_read, key=lambda kind: num_read[kind])
    if num_read[kind]:
        return OBJECTIVES[kind]
    return f"say which column is which: {columns_flag({'COLUMN': 'FIELD'})}; or write the rows in one of these formats"
