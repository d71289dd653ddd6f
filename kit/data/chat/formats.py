"""Converts a row of a data set, in any known format, to a sample in the kit's form. Pure: reads no file.

A sample is one of:

- ``{"messages": [...]}``, ``{"prompt": [...], "completion": [...]}``: conversations, optionally with ``tools`` (a
  list of objects) and ``chat_template_kwargs`` (values of variables of the chat template). Every message has ``role``
  (system, user, assistant or tool) and ``content`` (text), and may have ``name`` and ``tool_call_id``. Only the first
  message may be a system message. An assistant message may also have ``tool_calls`` (``{"type": "function",
  "function": {"name": ..., "arguments": {...}}}``, optionally with ``id``), ``reasoning_content`` and ``weight``
  (float; 1 if absent; 0 means that nothing is learned from it).
- ``{"prompt": text, "completion": text}`` and ``{"text": text}``.
- ``{"prompt": ..., "chosen": ..., "rejected": ...}``: two answers to one prompt, the better one and the worse one; all
  are lists of messages, or all are texts.
- ``{"prompt": ..., "completion": ..., "label": bool}``: an answer, and whether it is a good one.
- ``{"input_ids": [...]}``, optionally with ``labels`` (the id itself, or -100 where nothing is learned).

Promises: a row that does not fit is reported with the field, such as ``messages[2].role``; nothing that would change
what is learned is guessed or dropped. ``FORMATS``, at the end, declares the formats.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kit.config.prompt_format import question, reads_input
from kit.config.settings.objective import Rows
from kit.data.chat.lists import are_messages, are_printed_messages, explain_string, list_of, system_message
from kit.data.chat.messages import SPEAKERS, Message, check_text, read_kwargs, read_messages, read_tools
from kit.data.chat.preferences import answers_to_one_prompt
from kit.errors import Problem, Problems, kind

IGNORE = "ignore"  # in ``dataset_columns`` instead of a field: a column, or a key of messages, that is not to be read
NO_COLUMN = "no "  # so begins the problem of a row that lacks a column
MAX_ID = 2**31  # ids are stored as int32
IGNORED = -100  # the label of a token that is not learned
# The keys of a question with its answer, where each exchange of a conversation is an object.
EXCHANGES = (("input", "output"), ("human", "assistant"), ("user", "assistant"), ("question", "answer"))

Sample = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Format:
    """A format of rows.

    Attributes:
        columns: what every row has. The first column is that of no other format.
        make: makes a sample of the values of a row, by our names of the columns; a column that the data set lacks is
            absent, a value that the row lacks is None. What is wrong is added to the problems, and then the result
            does not count.
        optional: columns that a data set may have too; a row may lack them, or have null.
        all_or_none: columns that a data set may have too, but then in every row.
        is_chat: each row is a conversation. Its questions are not learned from, which is checked.
        holds_messages: the values of ``columns`` and ``all_or_none`` may be lists of messages, whose keys are looked
            at.
        rows: what a row holds, which an objective asks for.
    """

    columns: tuple[str, ...]
    make: Callable[[Mapping[str, Any], Problems], Sample]
    optional: tuple[str, ...] = ()
    all_or_none: tuple[str, ...] = ()
    is_chat: bool = False
    holds_messages: bool = False
    rows: Rows = "answers"

    @property
    def fields(self) -> tuple[str, ...]:
        """All columns that the format may have, by our names."""
        return self.columns + self.optional + self.all_or_none

    def __str__(self) -> str:
        return " and ".join(self.columns)


def format_of(fields: Mapping[str, str]) -> Format:
    """Return the format that ``columns.choose_fields`` chose: the first of ``fields`` is its first column."""
    return _BY_FIRST_COLUMN[next(iter(fields))]


def to_sample(
    row: Mapping[str, Any],
    fields: Mapping[str, str],
    prompt_format: str | None = None,
    replace: Mapping[str, str] | None = None,
    replaced: set[str] | None = None,
) -> dict[str, Any] | list[Problem]:
    """Convert a row to a sample in our form, or return its problems.

    ``fields`` is the result of ``columns.choose_fields``, ``prompt_format`` and ``replace`` those of the data set. The
    texts of ``replace`` that the row has are added to ``replaced``.
    ``Problem.where`` is a field of the row, such as ``messages[2].role``, or empty if the problem is the row itself.
    """
    format = format_of(fields)
    values = {ours: row.get(theirs) for ours, theirs in fields.items()}
    if None in values.values():
        needed = [theirs for ours, theirs in fields.items() if ours not in format.optional]
        if missing := [theirs for theirs in needed if theirs not in row]:
            found = f"{NO_COLUMN}{' and no '.join(map(repr, missing))} (it has {', '.join(row) or 'nothing'})"
            return [Problem("", found, " and ".join(needed) + " in every row")]
    if replace:
        values = _replaced(values, replace, set() if replaced is None else replaced)
    problems = Problems()
    if prompt_format is not None:
        values = _with_question(values, prompt_format, problems)
    sample = format.make(values, problems)
    return list(problems) or sample


def _replaced(value: Any, texts: Mapping[str, str], found: set[str]) -> Any:
    """A value with other texts for those of its strings. Adds to ``found`` which of ``texts`` stand there."""
    if isinstance(value, str):
        for old, new in texts.items():
            if old in value:
                found.add(old)
                value = value.replace(old, new)
        return value
    if isinstance(value, dict):
        return {key: _replaced(each, texts, found) for key, each in value.items()}
    return [_replaced(each, texts, found) for each in value] if isinstance(value, list) else value


def _with_question(values: Mapping[str, Any], prompt_format: str, problems: Problems) -> dict[str, Any]:
    """The values of a row with its input put into the instruction. What is no text is left to be refused later."""
    instruction, more = values.get("instruction"), values.get("input")
    if isinstance(instruction, list) or are_messages(instruction):
        expected = "a string, which prompt_format of the data set puts between other words"
        problems.append(Problem("instruction", "a list of messages", expected))
    if not isinstance(instruction, str) or not instruction.strip() or not isinstance(more, str | None):
        return dict(values)
    more = more if more and more.strip() else ""
    if more and not reads_input(prompt_format):
        problems.append(Problem("input", "a text", "none, because prompt_format of the data set has no {input}"))
    return {**values, "instruction": question(prompt_format, instruction, more), "input": None}


def _from_messages(values: Mapping[str, Any], problems: Problems) -> Sample:
    given = list_of("messages", values["messages"], problems)
    messages = read_messages("messages", given, problems)
    explain_string(given, problems)
    return {"messages": messages} | _template_inputs(values, problems)


def _from_conversations(values: Mapping[str, Any], problems: Problems) -> Sample:
    system = system_message(values, problems)
    given = list_of("conversations", values["conversations"], problems)
    # A first system turn without text is like a blank column ``system``: there is no system message. One that says
    # what the column says is the same message.
    first = _first_system_text(given)
    is_same = bool(system) and first == system[0]["content"].strip()
    if first == "" or is_same:
        given = [{"from": "system", "value": "none"}, *given[1:]]  # removed below; the others keep their numbers
        messages = read_messages("conversations", given, problems, SPEAKERS)[1:]
    else:
        messages = read_messages("conversations", given, problems, SPEAKERS, may_begin=not system)
    explain_string(given, problems)
    return {"messages": system + messages} | _template_inputs(values, problems)


def _first_system_text(given: Any) -> str | None:
    """The text of the first turn of ``given``, of any type, stripped, if it is the system's; else None."""
    if not isinstance(given, list) or not given or not isinstance(given[0], dict):
        return None
    speaker, text = (given[0].get(key, given[0].get(other)) for key, other in (("from", "role"), ("value", "content")))
    return text.strip() if speaker == "system" and isinstance(text, str) else None


def _from_pair(values: Mapping[str, Any], problems: Problems) -> Sample:
    prompt, completion = values["prompt"], values["completion"]
    if are_messages(prompt, completion):
        prompt, completion = list_of("prompt", prompt, problems), list_of("completion", completion, problems)
    if isinstance(prompt, list) != isinstance(completion, list):
        found = f"prompt is {kind(prompt)}, completion {kind(completion)}"
        problems.append(Problem("prompt", found, "two strings, or two lists of messages"))
        return {}
    if not isinstance(prompt, list):
        problems += check_text("prompt", prompt) + check_text("completion", completion)
        if not problems and are_printed_messages(prompt) and are_printed_messages(completion):
            problems.append(Problem("prompt", kind(prompt), "a string, or a list of messages"))
            explain_string(prompt, problems)
        return {"prompt": prompt, "completion": completion} | _template_inputs(values, problems)
    sample = {
        "prompt": read_messages("prompt", prompt, problems, needs_answer=False),
        "completion": read_messages("completion", completion, problems, may_begin=False),
    }
    return sample | _template_inputs(values, problems)


def _from_instruction(values: Mapping[str, Any], problems: Problems) -> Sample:
    instruction, output = values["instruction"], values["output"]
    if are_messages(instruction, output):
        instruction = list_of("instruction", instruction, problems)
        output = list_of("output", output, problems)
    before = system_message(values, problems) + _history(values, problems)
    answers = _answers(output, values.get("reasoning_content"), problems)
    if isinstance(instruction, list):
        # ``output`` is the answer to learn; what the assistant says in the prompt was written by whoever asked.
        prompt = read_messages("instruction", instruction, problems, may_begin=not before, needs_answer=False)
        problems += [
            Problem(key, "given beside an instruction that is a list of messages", "it as a message of the list")
            for key in ("input", "history")
            if values.get(key)
        ]
        return {"prompt": before + prompt, "completion": answers} | _template_inputs(values, problems)
    problems += check_text("instruction", instruction)
    more = values.get("input")
    if more is not None:
        problems += check_text("input", more, may_be_empty=True)
    if problems:
        return {}
    question = f"{instruction}\n\n{more}" if more and more.strip() else instruction
    messages = [*before, {"role": "user", "content": question}, *answers]
    return {"messages": messages} | _template_inputs(values, problems)


def _answers(output: Any, reasoning: Any, problems: Problems) -> list[Message]:
    """The column ``output``, a string or a list of messages, as messages, with the column ``reasoning_content``."""
    if isinstance(output, list):
        if reasoning:
            problems.append(Problem("reasoning_content", "given beside a list of messages", "it in the message"))
        return read_messages("output", output, problems, may_begin=False)
    problems += check_text("output", output)
    if not reasoning:
        return [{"role": "assistant", "content": output}]
    problems += check_text("reasoning_content", reasoning)
    return [{"role": "assistant", "content": output, "reasoning_content": reasoning}]


def _history(values: Mapping[str, Any], problems: Problems) -> list[Message]:
    """The column ``history``, a list of [question, answer] pairs, as messages; an empty list if there is none."""
    if not values.get("history"):
        return []
    history = list_of("history", values["history"], problems)
    if not isinstance(history, list):
        problems.append(Problem("history", kind(history), "a list of [question, answer] pairs"))
        explain_string(history, problems)
        return []
    return [message for i, pair in enumerate(history) for message in _exchange(f"history[{i}]", pair, problems)]


def _exchange(where: str, pair: Any, problems: Problems) -> list[Message]:
    """A question with its answer, as a list of two or as an object with known keys, as two messages."""
    expected = "a [question, answer] pair"
    keys: tuple[Any, ...] = (0, 1)
    if isinstance(pair, dict):
        given = {key for key, value in pair.items() if value is not None}
        known = [keys for keys in EXCHANGES if given == set(keys)]
        if not known:
            names = ", or ".join(" and ".join(keys) for keys in EXCHANGES)
            problems.append(Problem(where, f"an object with {', '.join(pair) or 'nothing'}", f"{expected}, or {names}"))
            return []
        keys = known[0]
    elif not isinstance(pair, list) or len(pair) != 2:
        problems.append(Problem(where, f"a list of {len(pair)}" if isinstance(pair, list) else kind(pair), expected))
        return []
    for key in keys:
        problems += check_text(f"{where}.{key}" if isinstance(key, str) else f"{where}[{key}]", pair[key])
    return [{"role": role, "content": pair[key]} for role, key in zip(("user", "assistant"), keys, strict=True)]


def _from_alternating_turns(values: Mapping[str, Any], problems: Problems) -> Sample:
    messages = system_message(values, problems)
    turns = list_of("alternating_turns", values["alternating_turns"], problems)
    if not isinstance(turns, list) or not turns:
        found = "empty" if turns == [] else kind(turns)
        problems.append(Problem("alternating_turns", found, "a list of strings, or of [question, answer] pairs"))
        explain_string(turns, problems)
    elif all(isinstance(turn, str) for turn in turns):
        if len(turns) == 1:
            problems.append(Problem("alternating_turns", "a single string", "a question and its answer, at least"))
        for i, turn in enumerate(turns):
            problems += check_text(f"alternating_turns[{i}]", turn)
            messages.append({"role": "assistant" if i % 2 else "user", "content": turn})
    else:
        for i, pair in enumerate(turns):
            messages += _exchange(f"alternating_turns[{i}]", pair, problems)
    return {"messages": messages} | _template_inputs(values, problems)


def _from_calls(values: Mapping[str, Any], problems: Problems) -> Sample:
    messages = system_message(values, problems)
    problems += check_text("instruction", values["instruction"])
    num_problems = len(problems)
    answer = {"role": "assistant", "tool_calls": values["tool_calls"]}
    answers = read_messages("tool_calls", [answer], problems)
    for i, problem in enumerate(problems[num_problems:], num_problems):  # the row has no such message
        problems[i] = replace(problem, where="tool_calls" + problem.where.removeprefix("tool_calls[0].tool_calls"))
    messages += [{"role": "user", "content": values["instruction"]}, *answers]
    return {"messages": messages} | _template_inputs(values, problems)


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


def _from_pair_of_answers(values: Mapping[str, Any], problems: Problems) -> Sample:
    sample = answers_to_one_prompt(values, ("chosen", "rejected"), problems)
    return {} if problems else sample | _template_inputs(values, problems)


def _from_rated_answer(values: Mapping[str, Any], problems: Problems) -> Sample:
    label = values["label"]
    if isinstance(label, str) and label.strip().lower() in ("true", "false"):  # a cell of a table
        label = label.strip().lower() == "true"
    if not isinstance(label, bool):
        found = repr(label) if isinstance(label, int | float | str) and len(str(label)) < 20 else kind(label)
        problems.append(Problem("label", found, "true (a good answer) or false"))
    sample = answers_to_one_prompt(values, ("completion",), problems)
    return {} if problems else sample | {"label": label} | _template_inputs(values, problems)


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


def _template_inputs(values: Mapping[str, Any], problems: Problems) -> Sample:
    """The columns ``tools`` and ``chat_template_kwargs`` as keys of a sample, if they hold something."""
    sample: Sample = {}
    for key, read in (("tools", read_tools), ("chat_template_kwargs", read_kwargs)):
        if values.get(key):
            with problems.caught():
                sample[key] = read(key, values[key])
    return {key: value for key, value in sample.items() if value}


# In order of precedence: the first format whose columns are all there is taken, of those with the rows asked for.
FORMATS = (
    Format(
        ("messages",), _from_messages, optional=("tools", "chat_template_kwargs"), is_chat=True, holds_messages=True
    ),
    Format(
        ("conversations",),
        _from_conversations,
        optional=("system", "tools", "chat_template_kwargs"),
        is_chat=True,
        holds_messages=True,
    ),
    Format(("prompt", "completion"), _from_pair, optional=("tools", "chat_template_kwargs"), holds_messages=True),
    Format(
        ("instruction", "output"),
        _from_instruction,
        optional=("input", "system", "history", "reasoning_content", "chat_template_kwargs"),
        is_chat=True,
        holds_messages=True,
    ),
    Format(
        ("tool_calls", "instruction"), _from_calls, optional=("system", "tools", "chat_template_kwargs"), is_chat=True
    ),
    # By its name alone nobody would know a list of strings from one of questions: it must be asked for.
    Format(
        ("alternating_turns",),
        _from_alternating_turns,
        optional=("system", "tools", "chat_template_kwargs"),
        is_chat=True,
    ),
    Format(("input_ids",), _from_token_ids, all_or_none=("labels",)),
    Format(("text",), _from_text),
    Format(
        ("chosen", "rejected"),
        _from_pair_of_answers,
        optional=("input", "system", "tools", "chat_template_kwargs"),
        all_or_none=("prompt", "instruction"),
        holds_messages=True,
        rows="pairs",
    ),
    Format(
        ("label", "completion"),
        _from_rated_answer,
        optional=("input", "system", "tools", "chat_template_kwargs"),
        all_or_none=("prompt", "instruction"),
        holds_messages=True,
        rows="rated",
    ),
)
_BY_FIRST_COLUMN = {format.columns[0]: format for format in FORMATS}


def plain_text(sample: Mapping[str, Any]) -> str:
    """All text of a sample in our form, to find samples with the same text. Empty for a sample of token ids."""
    if "text" in sample:
        return sample["text"]
    fields = ("messages", "prompt", "completion", "chosen", "rejected")
    parts = [sample[field] for field in fields if field in sample]
    return "\n".join(part if isinstance(part, str) else "\n".join(map(_text_of, part)) for part in parts)


def _text_of(message: Message) -> str:
    """Reasoning, content and tool calls of a message."""
    texts = [message.get("reasoning_content"), message["content"]]
    if "tool_calls" in message:
        texts.append(json.dumps(message["tool_calls"], ensure_ascii=False))
    return "\n".join(text for text in texts if text)
