"""Chooses the columns of a data set to read. Pure.

Promises:

- A format is chosen only by the kit's own names, or by the user's mapping. Names that are well known elsewhere are
  proposed as the flag to type, never guessed.
- A flag is proposed only if it reads most of the first rows, so it was tried. Where none does, the message says so.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from kit.data.chat.formats import FIELDS, FORMATS, IGNORE, Sample, listed, to_sample
from kit.data.chat.unused import Unused, read_keys, without_keys
from kit.data.chat.watched import SUBJECTS
from kit.errors import Problem, UserError, did_you_mean, raise_if

# Names of columns that are well known elsewhere.
QUESTIONS = tuple(
    "question query instruction prompt problem input user human source article document dialogue context text".split()
)
ANSWERS = tuple(
    "answer response output completion solution reply assistant gpt bot chatgpt target summary highlights".split()
)
CONTEXTS = ("input", "context")  # more text beside an instruction
CALLS = tuple("tool_calls calls function_calls answers answer output".split())  # may hold calls of tools
# May hold lists of messages, or of strings.
LISTS = tuple("messages conversations conversation dialog dialogs chat chats turns message data".split())
TEXTS = tuple("content document article body sentence code story".split())
PREFERENCES = ("chosen", "rejected")
NO_PAIRS = "preference pairs (objective dpo) are not trained on yet"
NUM_TRIED = 10  # rows with which a proposal is tried
CONVERT = 'convert each conversation to {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}'

Row = Mapping[str, Any]


def choose_fields(
    columns: Sequence[str],
    mapping: Mapping[str, str],
    name: str,
    may_lack: bool = False,
    rows: Iterable[Row] = (),
    path: str = "",
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
        rows: the first rows, of which a few are read. Without any, no flag is proposed.
        path: of the data set, if others of the run could not be read with the same mapping; empty: all could. Then
            an entry of the list of data sets is proposed instead of the flag.

    What ``mapping`` maps to ``IGNORE`` is treated as absent.

    Raises ``UserError`` if no format fits, if ``mapping`` names an unknown field or a column that is not there, or if
    the format does not read the first rows and another one would.
    """
    ignored = {theirs: ours for theirs, ours in mapping.items() if ours == IGNORE}
    columns = [column for column in columns if column not in ignored]
    mapping = {theirs: ours for theirs, ours in mapping.items() if theirs not in ignored}
    if may_lack:
        present = {theirs: ours for theirs, ours in mapping.items() if theirs in columns}
        if any(set(present.values()) <= set(fields) for fields in _complete(columns, present, ignored)):
            mapping = present
    problems: list[Problem] = []
    for theirs, ours in mapping.items():
        where = f"dataset_columns {theirs}={ours}"
        is_reversed = theirs in FIELDS and theirs not in columns and ours in columns
        if is_reversed:
            fix = f"the other way round: --dataset_columns {shlex.quote(f'{ours}={theirs}')}"
            problems.append(Problem(where, f"{ours!r} is the column, {theirs!r} the field", "column=field", fix))
            continue
        if ours not in FIELDS:
            names = (*FIELDS, IGNORE)
            problems.append(Problem(where, f"{ours!r} is no field", ", ".join(names), did_you_mean(ours, names)))
        elif list(mapping.values()).count(ours) > 1:
            problems.append(Problem(where, f"{ours} is given twice", "one column for each field"))
        if theirs not in columns:
            found = f"{name} has no column {theirs!r}"
            expected = "one of " + ", ".join(columns)
            problems.append(Problem(where, found, expected, did_you_mean(theirs, columns)))
    raise_if(problems)
    complete = _complete(columns, mapping, ignored)
    proposals = _Proposals(columns, ignored, list(islice(rows, NUM_TRIED)), path)
    if not complete:
        fix = proposals.text()
        raise UserError(Problem(name, f"columns {', '.join(columns)}", ", or ".join(map(str, FORMATS)), fix))
    fields = complete[0]
    for theirs, ours in mapping.items():
        if ours not in fields:
            found = f"{ours} does not go with {' and '.join(fields)}"
            problems.append(Problem(f"dataset_columns {theirs}={ours}", found, "fields of one format"))
    raise_if(problems)
    problem = proposals.misfit(fields)
    if problem and (fix := proposals.for_misfit()):
        raise UserError(Problem(f"{name} {problem.where}".rstrip(), problem.found, problem.expected, fix))
    if "text" in fields and not mapping and (fix := proposals.pair()):
        found = f"columns {', '.join(columns)}: texts to learn as a whole, or questions with answers"
        raise UserError(
            Problem(name, found, "a mapping that says which", f"{fix}; texts: {proposals.flag({'text': 'text'})}")
        )
    return fields


def _complete(columns: Sequence[str], mapping: Mapping[str, str], ignored: Iterable[str]) -> list[dict[str, str]]:
    """The formats whose columns are all there, best first, each as our fields to their columns."""
    present = {name: name for name in columns if name in FIELDS and name not in mapping}
    present |= {ours: theirs for theirs, ours in mapping.items()}
    complete = []
    for format in FORMATS:
        if all(column in present for column in format.columns):
            # Later rows may have an optional column that the first row lacks.
            later = {name: name for name in format.optional if name not in mapping and name not in ignored}
            theirs_of = later | present
            complete.append({ours: theirs_of[ours] for ours in format.fields if ours in theirs_of})
    return sorted(complete, key=lambda fields: -sum(field in fields for field in mapping.values()))


class _Proposals:
    """The flags to type for columns with well-known names. Each was tried with the first rows."""

    def __init__(self, columns: Sequence[str], ignored: Mapping[str, str], rows: Sequence[Row], path: str) -> None:
        self._columns = columns
        self._ignored = ignored
        self._path = path
        self._rows = [without_keys(row, read_keys(ignored)) for row in rows]
        self._theirs = {column.lower(): column for column in columns}

    def for_misfit(self) -> str:
        """What to do about rows that do not fit the format of their columns; empty if it is not known."""
        return self._of_preferences() if set(PREFERENCES) <= set(self._columns) else self.best()

    def text(self) -> str:
        """What to do about columns that are no format, for a message."""
        if set(PREFERENCES) <= set(self._columns):
            return self._of_preferences()
        if best := self.best():
            return best
        if self._find(LISTS) or self._is_nested():
            return "none of the formats holds these rows: " + (self._of_tree() or CONVERT)
        return "say which column is which: --dataset_columns column=field,column=field"

    def best(self) -> str:
        """The flag that reads the rows, and when to type it; empty if none is known."""
        for column in self._lists():
            for ours in ("messages", "conversations"):
                if self._works({column: ours}):
                    return f"if {column} holds lists of messages: {self.flag({column: ours})}"
        # By name only: other lists of strings may be choices, or several answers to one question.
        for column in self._named(LISTS):
            mapping = {column: "alternating_turns"}
            if self._works(mapping):
                return f"if the turns of {column} alternate, the user first: {self.flag(mapping)}"
        if pair := self.pair():
            return pair
        question = self._find(QUESTIONS)
        for column in self._named(CALLS) if question else []:
            mapping = {question: "instruction", column: "tool_calls"}
            if self._works(mapping):
                return f"if {question} asks and {column} calls tools: {self.flag(mapping)}"
        for column in self._named(TEXTS):
            if self._works({column: "text"}):
                return f"if {column} holds texts: {self.flag({column: 'text'})}"
        return ""

    def pair(self) -> str:
        """The flag for columns that are well known as question and answer; empty if there are none."""
        question, answer = self._find(QUESTIONS), self._find(ANSWERS)
        if not answer:
            return ""
        context = next((column for column in self._named(CONTEXTS) if column != question), "")
        chat = {question: "instruction", answer: "output"}
        if context:
            chat = {question: "instruction", context: "input", answer: "output"}
        text = {question: "prompt", answer: "completion"}
        if not question or not self._works(chat):
            # A list of messages that ends with the question.
            lists = ({column: "instruction", answer: "output"} for column in self._lists())
            chat = next((mapping for mapping in lists if self._works(mapping)), {})
            if not chat:
                return ""
            question = next(iter(chat))
        fix = f"if {question} asks and {answer} answers: {self.flag(chat)} makes a chat of each row"
        if question in text and self._works(text) and len(chat) == 2:
            fix += f", {self.flag(text)} joins the two as plain text"
        read = self._with_context(chat)
        if longer := [each for each in self._columns if each not in read and self._length(each) > self._length(answer)]:
            fix += f"; longer than {answer}, and not read: {', '.join(longer)} (map thoughts to reasoning_content)"
        return fix

    def flag(self, mapping: Mapping[str, str]) -> str:
        """The flag, or the entry, that gives ``mapping``, with what goes with it."""
        pairs = {**self._with_context(mapping), **self._ignored}
        text = ",".join(f"{theirs}={ours}" for theirs, ours in pairs.items())
        return f'{{path: {self._path}, columns: "{text}"}}' if self._path else f"--dataset_columns {shlex.quote(text)}"

    def misfit(self, fields: Mapping[str, str]) -> Problem | None:
        """The first problem of the first rows, if most of them do not fit the format ``fields``."""
        problems = [sample[0] for sample in (to_sample(row, fields) for row in self._rows) if isinstance(sample, list)]
        return problems[0] if len(problems) > len(self._rows) / 2 else None

    def _of_preferences(self) -> str:
        chosen = PREFERENCES[0]
        question = self._find(QUESTIONS)
        for mapping in (
            {chosen: "messages"},
            {chosen: "conversations"},
            {question: "instruction", chosen: "output"},
            {question: "prompt", chosen: "completion"},
        ):
            if "" not in mapping and self._works(mapping):
                return f"{NO_PAIRS}; {self.flag(mapping)} learns the chosen answers"
        fix = f"{NO_PAIRS}; none of the formats holds the chosen answers as conversations: {CONVERT}"
        if self._works({chosen: "text"}):
            fix += f"; {self.flag({chosen: 'text'})} learns them as plain text, the questions too"
        return fix

    def _works(self, mapping: Mapping[str, str]) -> bool:
        """Whether ``mapping`` makes samples of most of the first rows, and loses nothing of them."""
        complete = _complete(self._columns, self._with_context(mapping), self._ignored)
        if not complete or not set(mapping.values()) <= set(complete[0]):
            return False
        fields = complete[0]
        num_good = 0
        for row in self._rows:
            sample = to_sample(row, fields)
            num_good += isinstance(sample, dict) and _asks(sample) and not Unused(fields, self._ignored).check(row)
        return num_good > len(self._rows) / 2

    def _with_context(self, mapping: Mapping[str, str]) -> dict[str, str]:
        """``mapping`` with the columns of system prompts and tools that its format takes, under other names."""
        format = next(each for each in FORMATS if set(mapping.values()) <= set(each.fields))
        more = {}
        for ours in ("system", "tools"):
            theirs = self._find(name for name, subject in SUBJECTS.items() if subject == ours)
            if theirs and theirs != ours and ours in format.fields:
                more[theirs] = ours
        return {**mapping, **more}

    def _find(self, words: Iterable[str]) -> str:
        """The column with the first of ``words`` that is one; empty if none is."""
        return next(iter(self._named(words)), "")

    def _length(self, column: str) -> int:
        """The characters that a column has in the first rows, as strings or as lists of strings."""
        values = [listed(row.get(column)) for row in self._rows]
        texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
        return sum(len(text) for text in texts if isinstance(text, str))

    def _named(self, words: Iterable[str]) -> list[str]:
        """The columns whose names are among ``words``, in the order of these."""
        return [self._theirs[word] for word in words if word in self._theirs]

    def _lists(self) -> Iterator[str]:
        """The columns that may hold lists of messages: by their names, then by what they hold."""
        named = self._named(LISTS)
        yield from named
        for column in self._columns:
            if column not in named and any(isinstance(listed(row.get(column)), list) for row in self._rows):
                yield column

    def _is_nested(self) -> bool:
        return any(isinstance(listed(value), list | dict) for row in self._rows for value in row.values())

    def _of_tree(self) -> str:
        """What to do about trees of replies; empty if there are none."""
        for value in (value for row in self._rows for value in row.values()):
            if isinstance(value, dict) and "replies" in value:
                return f"{CONVERT}, one for each path from a prompt to an answer"
        return ""


def _asks(sample: Sample) -> bool:
    """Whether a sample is plain text, or a conversation in which a user asks something."""
    messages = sample.get("messages", sample.get("prompt"))
    return not isinstance(messages, list) or any(message["role"] == "user" for message in messages)
