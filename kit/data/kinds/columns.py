"""Chooses the columns of a dataset to read. Pure.

Promise: a format is chosen only by the kit's own names, or by the user's mapping. Names that are well known elsewhere,
and whose first values have the type of a field, are quoted by the message, as a mapping to type, and never guessed.
"""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kit.data.chat.formats import ANSWERS, IGNORE, alone, opened
from kit.data.chat.media_parts import MEDIA_COLUMNS
from kit.data.chat.messages import are_messages, is_message
from kit.data.kinds.answers import AnswerRows
from kit.data.kinds.kind import RowKind
from kit.data.kinds.kinds import KINDS
from kit.system.errors import Problem, UserError, did_you_mean, raise_if

# Names of columns, or of keys of their objects, that are well known elsewhere, for each field that they usually mean,
# the likeliest first.
ALIASES = {
    "conversations": "conversation dialog dialogs chat chats turns",
    "instruction": "question query prompt problem input user human source article document",
    "input": "context",
    "output": "attempt deepseek_attempt deepseek_solution generated_solution response completion solution answer reply "
    "assistant target summary highlights caption captions transcript transcription sentence answers label text",
    "system": "system_prompt system_message",
    "reasoning_content": "thinking thinking_trajectories deepseek_thinking_trajectory deepseek_reasoning complex_cot "
    "chain_of_thought cot rationale",
    "images": "image img picture photo file_name image_path image_file",
    "audio": "audios sound speech wav audio_path audio_file",
    "text": "content document article body sentence code story",
    "chosen": "chosen_response response_chosen accepted preferred preferred_output better winner response_j",
    "rejected": "rejected_response response_rejected dispreferred non_preferred_output worse loser response_k",
    "prompt": "input messages conversations question query problem instruction context",
    "completion": "messages conversations response output solution answer ground_truth",
    "label": "kto_tag labels class category target intent",
    "query": "question sentence1 premise text1",
    "document": "passage sentence2 hypothesis text2 context",
    "anchor": "query question sentence1 premise",
    "positive": "answer document passage pos sentence2 entailment",
    "negative": "negatives hard_negative neg contradiction",
}
_CHATS = ("messages", "conversations")
_MESSAGES = (*_CHATS, "prompt", "completion", "chosen", "rejected")  # fields that may hold messages
# Fields that hold neither text nor messages.
_OTHERS = (
    *MEDIA_COLUMNS,
    "history",
    "tools",
    "chat_template_kwargs",
    "input_ids",
    "label",
    "labels",
    "negative",
    "margin",
)


def columns_flag(columns: Mapping[str, str]) -> str:
    """Return ``--dataset_columns`` with this mapping, their column to our field; as JSON if a name has separators."""
    text = ",".join(f"{theirs}={ours}" for theirs, ours in columns.items())
    if any("," in name or "=" in name for name in columns):
        text = json.dumps(dict(columns), ensure_ascii=False)
    return f"--dataset_columns {shlex.quote(text)}"


def choose_fields(
    row: Mapping[str, Any],
    mapping: Mapping[str, str],
    name: str,
    may_lack: bool = False,
    kind: type[RowKind] = AnswerRows,
    proposed: list[Problem] | None = None,
) -> dict[str, str]:
    """Choose a format by the columns of a dataset: ``{"prompt": "question", "completion": "answer"}``.

    The result maps each of our fields to their column. If the columns allow several formats, the one with most fields
    of ``mapping`` is taken, and of equals the first of the kind.

    Args:
        row: the first of the dataset.
        mapping: the recipe's ``dataset_columns``, their column to our field, or a key of the objects in a column, such
            as ``reward_model.ground_truth``. What it maps to ``IGNORE`` is absent.
        name: the dataset's, for messages.
        may_lack: ``mapping`` was written for another dataset (the training data, while this one is for evaluation):
            columns that this one lacks are ignored if it has a complete format without them.
        kind: the dataset type that the objective needs.
        proposed: if no format fits and the message has a mapping, it is added here, and the fields are those of the
            mapping: so what else is wrong is found in the same round.

    Raises ``UserError`` if no format fits, or if ``mapping`` names an unknown field or a column that is not there.
    """
    ignored = {theirs for theirs, ours in mapping.items() if ours == IGNORE}
    mapping = {theirs: ours for theirs, ours in mapping.items() if theirs not in ignored}
    row = {column: value for column, value in opened(row, mapping).items() if column not in ignored}
    columns = list(row)
    if may_lack:
        present = {theirs: ours for theirs, ours in mapping.items() if theirs in columns}
        if any(set(present.values()) <= set(fields) for fields in _complete(columns, present, ignored, kind)):
            mapping = present
    raise_if(_problems_of_mapping(columns, mapping, name, kind))
    complete = _complete(columns, mapping, ignored, kind)
    if not complete:
        formats = ", or ".join(map(str, kind.formats))
        mapping, step = _next_step(row, ignored, kind)
        problem = Problem(name, f"columns {', '.join(columns)}", formats, step)
        if proposed is None or not mapping:
            raise UserError(problem)
        proposed.append(problem)
        complete = _complete([*opened(row, mapping)], mapping, ignored, kind)
    fields = complete[0]
    for theirs, ours in mapping.items():
        if ours not in fields:
            found = f"{ours} does not go with {' and '.join(fields)}"
            fix = "leave it out"
            if ours in MEDIA_COLUMNS and "text" in fields:
                flag = columns_flag({theirs: ours, fields["text"]: "output"})
                fix = f"{flag}: the text is the answer to the {MEDIA_COLUMNS[ours]}"
            raise UserError(f"dataset_columns {theirs}={ours}", found, "fields of one format", fix)
    return fields


def _problems_of_mapping(
    columns: Sequence[str], mapping: Mapping[str, str], name: str, kind: type[RowKind]
) -> list[Problem]:
    """What is wrong with a mapping by itself."""
    problems: list[Problem] = []
    known = tuple(dict.fromkeys(field for format in kind.formats for field in format.fields))
    for theirs, ours in mapping.items():
        where = f"dataset_columns {theirs}={ours}"
        if ours not in known:
            expected = ", ".join((*known, IGNORE))
            problems.append(Problem(where, f"{ours!r} is no field", expected, did_you_mean(ours, known)))
        elif list(mapping.values()).count(ours) > 1:
            problems.append(Problem(where, f"{ours} is given twice", "one column for each field"))
        if theirs not in columns:
            found, expected = f"{name} has no column {theirs!r}", "one of " + ", ".join(columns)
            fix = did_you_mean(theirs, columns) or "--dataset_columns none forgets those of a recipe"
            problems.append(Problem(where, found, expected, fix))
    return problems


def _complete(
    columns: Sequence[str], mapping: Mapping[str, str], ignored: Iterable[str], kind: type[RowKind]
) -> list[dict[str, str]]:
    """The formats whose columns are all there, best first, each as our fields to their columns."""
    present = {name: name for name in columns if name not in mapping}
    present |= {ours: theirs for theirs, ours in mapping.items()}
    complete = []
    for format in kind.formats:
        if all(column in present for column in format.columns):
            # Later rows may have an optional column that the first row lacks.
            later = {name: name for name in format.optional if name not in mapping and name not in ignored}
            theirs_of = later | present
            complete.append({ours: theirs_of[ours] for ours in format.fields if ours in theirs_of})
    return sorted(complete, key=lambda fields: -sum(field in fields for field in mapping.values()))


def _next_step(row: Mapping[str, Any], ignored: set[str], kind: type[RowKind]) -> tuple[dict[str, str], str]:
    """A mapping for columns that are no format; and what to do about them: it, or another objective."""
    keys = {
        f"{column}.{key}": value
        for column, inner in row.items()
        if isinstance(inner, dict) and not is_message(inner)
        for key, value in inner.items()
    }
    for format in kind.formats:
        mapping: dict[str, str] = {}  # their column to our field
        for ours in format.fields:
            values = row if ours in format.optional else {**row, **keys}
            fitting = (
                {theirs: ours}
                for name in [ours, *ALIASES.get(ours, "").split()]
                for theirs, value in values.items()
                if theirs.rpartition(".")[2].lower() == name
                if theirs not in mapping and _fits(kind, ours, theirs, value)
            )
            mapping |= next(fitting, {})
        if set(format.columns) <= set(mapping.values()):
            return mapping, columns_flag(mapping | dict.fromkeys(sorted(ignored), IGNORE))
    step = f"say which column is which: {columns_flag({'COLUMN': 'FIELD'})}; or write the rows in one of these formats"
    kinds = sorted(KINDS.values(), key=lambda other: other.is_demonstration)  # demonstrations would read others too
    others_read = (other.objective for other in kinds if other != kind and _complete([*row], {}, ignored, other))
    return {}, next(others_read, step)


def _fits(kind: type[RowKind], ours: str, theirs: str, value: Any) -> bool:
    """Whether a value has the type of a field. A question as text is an instruction, of a chat."""
    if ours in _OTHERS:
        return value is not None
    if are_messages(value) or is_message(value):
        return ours in _MESSAGES
    if ours == "prompt" and (theirs != ours or kind.is_demonstration):
        return False
    return isinstance(alone(value) if ours in ANSWERS else value, str) and ours not in _CHATS
