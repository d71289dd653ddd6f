"""Converts a row of a dataset, in any known format, to a sample in the kit's form. Pure: reads no file.

A sample is one of:

- ``{"messages": [...]}``, ``{"prompt": [...], "completion": [...]}``: conversations, optionally with ``tools`` (a
  list of objects) and ``chat_template_kwargs`` (values of variables of the chat template). Every message has ``role``
  (system, user, assistant or tool) and ``content`` (text), and may have ``name`` and ``tool_call_id``. Only the first
  message may be a system message. An assistant message may also have ``tool_calls`` (``{"type": "function",
  "function": {"name": ..., "arguments": {...}}}``, optionally with ``id``), ``reasoning_content`` and ``weight``
  (float; 1 if absent; 0 masks it out of the loss).
- ``{"prompt": text, "completion": text}`` and ``{"text": text}``.
- ``{"prompt": ...}``, messages or a text: a prompt alone, whose answer the policy writes.
- ``{"prompt": ..., "chosen": ..., "rejected": ...}``: two answers to one prompt, the better one and the worse one; all
  are lists of messages, or all are texts.
- ``{"prompt": ..., "completion": ..., "label": bool}``: an answer, and whether it is a good one.
- All but the next may have ``images``, if they are conversations: see ``kit.data.chat.media_parts``.
- ``{"input_ids": [...]}``, optionally with ``labels`` (the id itself, or -100 where the loss is masked).
- For a classification or embedding head ``{"plain": [[text], ...]}``, each a text or a pair of them, or a prompt with
  answers or without; with ``margin``, or with ``label``, a list of names.

Promises: a row that does not fit is reported with the first field that is wrong, such as ``messages[2].role``; nothing
that would change the training is guessed or dropped. Each module of ``kit.data.kinds`` declares its formats.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kit.config.prompt_format import question, reads_input
from kit.data.chat.media_parts import MEDIA_COLUMNS, media_of_cell, with_media
from kit.data.chat.messages import are_messages, check_text, read_kwargs, read_tools
from kit.system.errors import Problem, UserError

IGNORE = "ignore"  # in ``dataset_columns`` instead of a field: a column, or a key of messages, that is not to be read
NO_COLUMN = "no "  # so begins the problem of a row that lacks a column
MAX_ID = 2**31  # ids are stored as int32
IGNORED = -100  # the label of a token that is masked out of the loss
ALPACA = "{instruction}[\n\n{input}]"  # the prompt_format of datasets that have none
ANSWERS = ("output", "completion", "chosen", "rejected", "reasoning_content")  # which may stand alone in a list

Sample = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Format:
    """A format of rows.

    Attributes:
        columns: what every row has. A format with the same first one and only some of the others comes later.
        make: makes a sample of the values of a row, by our names of the columns; a column that the dataset lacks is
            absent, a value that the row lacks is None. Raises ``UserError`` with the first thing that is wrong.
        optional: columns that a dataset may have too; a row may lack them, or have null.
        all_or_none: columns that a dataset may have too, but then in every row.
        are_prompts: nothing of an answer is learned.
        is_chat: each row is a conversation. Its user turns are masked out of the loss, which is checked.
    """

    columns: tuple[str, ...]
    make: Callable[[Mapping[str, Any]], Sample]
    optional: tuple[str, ...] = ()
    all_or_none: tuple[str, ...] = ()
    is_chat: bool = False
    are_prompts: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """All columns that the format may have, by our names."""
        return self.columns + self.optional + self.all_or_none

    def __str__(self) -> str:
        return " and ".join(self.columns)


def to_sample(
    row: Mapping[str, Any],
    fields: Mapping[str, str],
    format: Format,
    prompt_format: str | None = None,
) -> dict[str, Any] | list[Problem]:
    """Convert a row to a sample in our form, or return its problems.

    ``fields`` is the result of ``choose_fields``, ``format`` what they are of, ``prompt_format`` that of the dataset.
    ``Problem.where`` is a field of the row, such as ``messages[2].role``, or empty if the problem is the row itself.
    """
    row = opened(row, fields.values())
    values = {ours: row.get(theirs) for ours, theirs in fields.items()}
    values |= {ours: alone(values[ours]) for ours in ANSWERS if ours in values}
    if None in values.values():
        needed = [theirs for ours, theirs in fields.items() if ours not in format.optional]
        if missing := [theirs for theirs in needed if theirs not in row]:
            found = f"{NO_COLUMN}{' and no '.join(map(repr, missing))} (it has {', '.join(row) or 'nothing'})"
            return [Problem("", found, " and ".join(needed) + " in every row")]
    try:
        media = {name: media_of_cell(values.get(name)) for name in MEDIA_COLUMNS if name in format.fields}
        sample = format.make(_with_question(values | media, prompt_format))
        return with_media(sample, {name: each for name, each in media.items() if fields.get(name) in row})
    except UserError as error:
        return error.problems


def opened(row: Mapping[str, Any], columns: Iterable[str]) -> Mapping[str, Any]:
    """Return ``row`` with the keys of an object as columns, for each of ``columns`` that looks into one: ``a.b``."""
    for column in columns:
        whole = column.partition(".")[0]
        if column not in row and isinstance(inner := row.get(whole), dict):
            keys = {f"{whole}.{key}": value for key, value in inner.items()}
            row = {**{name: row[name] for name in row if name != whole}, **keys}
    return row


def alone(value: Any) -> Any:
    """Return the text of a list with one text; any other value as it is."""
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str) else value


def _with_question(values: Mapping[str, Any], prompt_format: str | None) -> Mapping[str, Any]:
    """The values of a row with its input put into the instruction."""
    instruction, more = values.get("instruction"), values.get("input")
    more = "" if more is None else more  # a 0 is refused, as a 5 is
    if not check_text("input", more, may_be_empty=True).strip():
        more = ""
    if more and (instruction is None or are_messages(instruction)):
        expected = "it with an instruction that is a string"
        raise UserError("input", "given without an instruction", expected)
    if more and prompt_format and not reads_input(prompt_format):
        expected = "none, because prompt_format of the dataset has no {input}"
        raise UserError("input", "a text", expected)
    if not more and (prompt_format is None or instruction is None or are_messages(instruction)):
        return values
    wording = prompt_format or ALPACA
    return {**values, "instruction": question(wording, check_text("instruction", instruction), more)}


def template_inputs(values: Mapping[str, Any]) -> Sample:
    """The columns ``tools`` and ``chat_template_kwargs`` as keys of a sample, if they hold something."""
    read = {"tools": read_tools, "chat_template_kwargs": read_kwargs}
    return {key: made for key in read if values.get(key) and (made := read[key](key, values[key]))}
