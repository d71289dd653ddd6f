"""Converts a row of a data set, in any known format, to a sample in the kit's form. Pure: reads no file.

A sample is one of:

- ``{"messages": [...]}``, ``{"prompt": [...], "completion": [...]}``: conversations, optionally with ``tools`` (a
  list of objects) and ``chat_template_kwargs`` (values of variables of the chat template). Every message has ``role``
  (system, user, assistant or tool) and ``content`` (text), and may have ``name`` and ``tool_call_id``. Only the first
  message may be a system message. An assistant message may also have ``tool_calls`` (``{"type": "function",
  "function": {"name": ..., "arguments": {...}}}``, optionally with ``id``), ``reasoning_content`` and ``weight``
  (float; 1 if absent; 0 means that nothing is learned from it).
- ``{"prompt": text, "completion": text}`` and ``{"text": text}``.
- ``{"input_ids": [...]}``, optionally with ``labels`` (the id itself, or -100 where nothing is learned).

Promises: a row that does not fit is reported with the field, such as ``messages[2].role``; nothing that would change
what is learned is guessed or dropped.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kit.data.chat.messages import SPEAKERS, Message, check_text, read_kwargs, read_messages, read_tools
from kit.errors import Problem, Problems, UserError, did_you_mean, kind, raise_if

# The columns that each format needs, and its optional columns. The first format whose columns are all there is taken.
FORMATS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("messages",): ("tools", "chat_template_kwargs"),
    ("conversations",): ("system", "tools", "chat_template_kwargs"),
    ("prompt", "completion"): ("tools", "chat_template_kwargs"),
    ("instruction", "output"): ("input", "system", "chat_template_kwargs"),
    ("input_ids",): ("labels",),
    ("text",): (),
}
FIELDS = tuple(dict.fromkeys(field for needed, optional in FORMATS.items() for field in needed + optional))
OPTIONAL = ("tools", "system", "input", "chat_template_kwargs")  # any row may lack these, or have null
EXPECTED = "messages, or prompt and completion, or text, or conversations, or instruction and output, or input_ids"

MAX_ID = 2**31  # ids are stored as int32
IGNORED = -100  # the label of a token that is not learned

Sample = dict[str, Any]


def choose_fields(
    columns: Sequence[str], mapping: Mapping[str, str], name: str, may_lack: bool = False
) -> dict[str, str]:
    """Choose a format by the columns of a data set: ``{"prompt": "question", "completion": "answer"}``.

    The result maps each of our fields to their column. If the columns allow several formats, the one with most fields
    of ``mapping`` is taken, and of equals the first of ``FORMATS``.

    Args:
        columns: the columns of the data set.
        mapping: the recipe's ``dataset_columns``, their column to our field.
        name: the data set's, for messages.
        may_lack: ``mapping`` was written for another data set (the training data, while this one is for evaluation):
            columns that this one lacks are ignored if it has a complete format without them.

    Raises ``UserError`` if no format fits, or if ``mapping`` names an unknown field or a column that is not there.
    """
    if may_lack:
        present = {theirs: ours for theirs, ours in mapping.items() if theirs in columns}
        if any(set(present.values()) <= set(fields) for fields in _complete(columns, present)):
            mapping = present
    problems: list[Problem] = []
    for theirs, ours in mapping.items():
        where = f"dataset_columns {theirs}={ours}"
        if ours not in FIELDS:
            problems.append(Problem(where, f"{ours!r} is no field", ", ".join(FIELDS), did_you_mean(ours, FIELDS)))
        elif list(mapping.values()).count(ours) > 1:
            problems.append(Problem(where, f"{ours} is given twice", "one column for each field"))
        if theirs not in columns:
            found, hint = f"{name} has no column {theirs!r}", did_you_mean(theirs, columns)
            problems.append(Problem(where, found, "one of " + ", ".join(columns), hint))
    raise_if(problems)
    complete = _complete(columns, mapping)
    if not complete:
        fix = "say which column is which: --dataset_columns theirs=ours,theirs=ours"
        if "chosen" in columns and "rejected" in columns:
            ours = "completion" if "prompt" in columns else "messages"
            fix = f"preference pairs are not trained on here; --dataset_columns chosen={ours} takes the chosen answers"
        raise UserError(Problem(name, f"columns {', '.join(columns)}", EXPECTED, fix))
    for theirs, ours in mapping.items():
        if ours not in complete[0]:
            found = f"{ours} does not go with {' and '.join(complete[0])}"
            problems.append(Problem(f"dataset_columns {theirs}={ours}", found, "fields of one format"))
    raise_if(problems)
    return complete[0]


def _complete(columns: Sequence[str], mapping: Mapping[str, str]) -> list[dict[str, str]]:
    """All formats whose needed columns are there, best first, each as our field to their column.

    The first field of each is a key of ``MAKERS``.
    """
    theirs_of = {name: name for name in columns if name in FIELDS and name not in mapping}
    theirs_of |= {ours: theirs for theirs, ours in mapping.items()}
    # Later rows may have an optional column that the first row lacks.
    theirs_of |= {name: name for name in OPTIONAL if name not in theirs_of and name not in mapping}
    complete = [
        {field: theirs_of[field] for field in needed + optional if field in theirs_of}
        for needed, optional in FORMATS.items()
        if all(field in theirs_of for field in needed)
    ]
    return sorted(complete, key=lambda fields: -sum(field in fields for field in mapping.values()))


def to_sample(row: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any] | list[Problem]:
    """Convert a row to a sample in our form, or return its problems.

    ``fields`` is the result of ``choose_fields``. ``Problem.where`` is a field of the row, such as
    ``messages[2].role``, or empty if the problem is the row itself.
    """
    values = {ours: row.get(theirs) for ours, theirs in fields.items()}
    if None in values.values():
        needed = [theirs for ours, theirs in fields.items() if ours not in OPTIONAL]
        if missing := [theirs for theirs in needed if theirs not in row]:
            found = f"no {' and no '.join(map(repr, missing))} (it has {', '.join(row) or 'nothing'})"
            return [Problem("", found, " and ".join(needed) + " in every row")]
    if "input_ids" in fields and "labels" not in fields and "labels" in row:
        return [Problem("labels", "given here, and not in the first row", "labels in every row, or in none")]
    problems = Problems()
    sample = MAKERS[next(iter(fields))](values, problems)
    return list(problems) or sample


def _from_messages(values: Mapping[str, Any], problems: Problems) -> Sample:
    return {"messages": read_messages("messages", values["messages"], problems)} | _tools(values, problems)


def _from_conversations(values: Mapping[str, Any], problems: Problems) -> Sample:
    system = _system(values, problems)
    messages = read_messages("conversations", values["conversations"], problems, SPEAKERS, may_begin=not system)
    return {"messages": system + messages} | _tools(values, problems)


def _from_pair(values: Mapping[str, Any], problems: Problems) -> Sample:
    prompt, completion = values["prompt"], values["completion"]
    if isinstance(prompt, list) != isinstance(completion, list):
        found = f"prompt is {kind(prompt)}, completion {kind(completion)}"
        problems.append(Problem("prompt", found, "two texts, or two lists of messages"))
        return {}
    if not isinstance(prompt, list):
        problems += check_text("prompt", prompt) + check_text("completion", completion)
        return {"prompt": prompt, "completion": completion} | _tools(values, problems)
    sample = {
        "prompt": read_messages("prompt", prompt, problems, needs_answer=False),
        "completion": read_messages("completion", completion, problems, may_begin=False),
    }
    return sample | _tools(values, problems)


def _from_instruction(values: Mapping[str, Any], problems: Problems) -> Sample:
    instruction, more, output = values["instruction"], values.get("input"), values["output"]
    messages = _system(values, problems)
    problems += check_text("instruction", instruction) + check_text("output", output)
    if more is not None:
        problems += check_text("input", more, may_be_empty=True)
    if problems:
        return {}
    question = f"{instruction}\n\n{more}" if more and more.strip() else instruction
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
    return {"messages": messages} | _tools(values, problems)


def _from_token_ids(values: Mapping[str, Any], problems: Problems) -> Sample:
    ids = values["input_ids"]
    problems += _check_ids("input_ids", ids)
    if "labels" not in values:
        return {"input_ids": ids}
    labels = values["labels"]
    if not isinstance(labels, list):
        problems.append(Problem("labels", kind(labels), "a list of ids"))
    elif not problems and len(labels) != len(ids):
        problems.append(Problem("labels", f"{len(labels)} of them for {len(ids)} input_ids", "as many"))
    elif not problems and (labels != ids or set(map(type, labels)) != {int}):
        pairs = enumerate(zip(labels, ids, strict=True))
        wrong = next((i for i, (label, id_) in pairs if label not in (id_, IGNORED) or type(label) is not int), None)
        if wrong is not None:
            expected = f"{IGNORED}, or {ids[wrong]} as in input_ids: labels are not shifted"
            problems.append(Problem(f"labels[{wrong}]", _id_or_kind(labels[wrong]), expected))
    return {"input_ids": ids, "labels": labels}


def _from_text(values: Mapping[str, Any], problems: Problems) -> Sample:
    problems += check_text("text", values["text"])
    return {"text": values["text"]}


MAKERS = {
    "messages": _from_messages,
    "prompt": _from_pair,
    "text": _from_text,
    "conversations": _from_conversations,
    "instruction": _from_instruction,
    "input_ids": _from_token_ids,
}


def _id_or_kind(value: Any) -> str:
    """A number as it is; the kind of any other value. For messages about ids."""
    return f"{value}"[:80] if type(value) in (int, float) else kind(value)


def _check_ids(where: str, ids: Any) -> list[Problem]:
    if not isinstance(ids, list):
        return [Problem(where, kind(ids), "a list of ids")]
    if not ids:
        return [Problem(where, "empty", "at least one id")]
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < MAX_ID:
        return []
    wrong = next(i for i, value in enumerate(ids) if type(value) is not int or not 0 <= value < MAX_ID)
    return [Problem(f"{where}[{wrong}]", _id_or_kind(ids[wrong]), "a whole number of at least 0")]


def _system(values: Mapping[str, Any], problems: Problems) -> list[Message]:
    """The column ``system`` as a list of one system message; an empty list if the column is blank or absent."""
    system = values.get("system")
    if system is None or system == "":
        return []
    problems += check_text("system", system, may_be_empty=True)
    return [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []


def _tools(values: Mapping[str, Any], problems: Problems) -> Sample:
    """The columns ``tools`` and ``chat_template_kwargs`` as keys of a sample, if they hold something."""
    sample: Sample = {}
    for key, read in (("tools", read_tools), ("chat_template_kwargs", read_kwargs)):
        if values.get(key):
            with problems.caught():
                sample[key] = read(key, values[key])
    return {key: value for key, value in sample.items() if value}


def plain_text(sample: Mapping[str, Any]) -> str:
    """All text of a sample in our form, to find samples with the same text. Empty for a sample of token ids."""
    if "text" in sample:
        return sample["text"]
    parts = [sample[field] for field in ("messages", "prompt", "completion") if field in sample]
    return "\n".join(part if isinstance(part, str) else "\n".join(map(_text_of, part)) for part in parts)


def _text_of(message: Message) -> str:
    """Reasoning, content and tool calls of a message."""
    texts = [message.get("reasoning_content"), message["content"]]
    if "tool_calls" in message:
        texts.append(json.dumps(message["tool_calls"], ensure_ascii=False))
    return "\n".join(text for text in texts if text)
