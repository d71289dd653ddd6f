"""Chooses the columns of a data set to read. Pure.

Promises:

- A format is chosen only by the kit's own names, or by the user's mapping. Names that are well known elsewhere are
  proposed as the flag to type, never guessed.
- A flag is proposed only if it reads most of the first rows, so it was tried. Where none does, the message says so.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import chain, islice
from typing import Any

from kit.config.settings.objective import Rows
from kit.data.chat.columns_flag import Listed, columns_flag
from kit.data.chat.formats import FORMATS, IGNORE, Format, Sample, to_sample
from kit.data.chat.lists import listed
from kit.data.chat.unused import Unused, read_keys, without_keys
from kit.data.chat.watched import SUBJECTS
from kit.errors import Problem, UserError, raise_if

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
# Names of columns that say whether an answer is good.
LABELS = ("label", "kto_tag", "is_good", "desirable", "thumbs_up")
# The names of two answers to one question, the better one first, as patterns of words beside others such as response.
BETTER = (
    ("chosen", "rejected"),
    ("accepted", "rejected"),
    ("preferred", "rejected"),
    ("preferred", "dispreferred"),
    ("preferred", "non_preferred"),
    ("better", "worse"),
    ("best", "worst"),
    ("winner", "loser"),
    ("winning", "losing"),
    ("j", "k"),
)
# The same where another column says which is the better one, and what a third answer would be called: then they are
# choices.
EITHER = (("a", "b", "c"), ("0", "1", "2"), ("1", "2", "3"))
ANSWER_WORDS = frozenset(
    f"{word}{end}"
    for word in "response answer completion output reply conversation message text summary content generation".split()
    for end in ("", "s")
)
NUM_TRIED = 10  # rows with which a proposal is tried
CONVERT = 'convert each conversation to {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}'

Row = Mapping[str, Any]
# An objective that learns from each kind of rows, for messages.
OBJECTIVE_OF: dict[Rows, str] = {"answers": "sft", "pairs": "dpo", "rated": "kto"}


def choose_fields(
    columns: Sequence[str],
    mapping: Mapping[str, str],
    name: str,
    may_lack: bool = False,
    rows: Iterable[Row] = (),
    among: Listed | None = None,
    wanted: Rows = "answers",
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
        among: the data set among those of its flag; None: it is the only one.
        wanted: what the rows must hold for the objective.

    What ``mapping`` maps to ``IGNORE`` is treated as absent.

    Raises ``UserError`` if no format fits, if ``mapping`` names an unknown field or a column that is not there, or if
    the format does not read the first rows and another one would.
    """
    given = mapping
    ignored = {theirs: ours for theirs, ours in mapping.items() if ours == IGNORE}
    columns = [column for column in columns if column not in ignored]
    mapping = {theirs: ours for theirs, ours in mapping.items() if theirs not in ignored}
    if may_lack:
        present = {theirs: ours for theirs, ours in mapping.items() if theirs in columns}
        if any(set(present.values()) <= set(fields) for fields in _complete(columns, present, ignored, wanted)):
            mapping = present
    proposals = _Proposals(columns, ignored, list(islice(rows, NUM_TRIED)), among, wanted)
    raise_if(_problems_of_mapping(columns, mapping, given, name, proposals))
    complete = _complete(columns, mapping, ignored, wanted)
    if not complete:
        fix = proposals.text(name)
        formats = ", or ".join(map(str, formats_of(wanted)))
        raise UserError(Problem(name, f"columns {', '.join(columns)}", formats, fix))
    fields = complete[0]
    for theirs, ours in mapping.items():
        if ours not in fields:
            found = f"{ours} does not go with {' and '.join(fields)}"
            fix = proposals.without(mapping, theirs)
            raise UserError(Problem(f"dataset_columns {theirs}={ours}", found, "fields of one format", fix))
    problem = proposals.misfit(fields)
    if problem and (fix := proposals.for_misfit()):
        raise UserError(Problem(f"{name} {problem.where}".rstrip(), problem.found, problem.expected, fix))
    if "text" in fields and not mapping and (fix := proposals.pair()):
        found = f"columns {', '.join(columns)}: texts to learn as a whole, or questions with answers"
        fix = f"to learn each text as a whole: {proposals.flag({'text': 'text'})}; or {fix}"
        raise UserError(Problem(name, found, "a mapping that says which", fix))
    return fields


def _problems_of_mapping(
    columns: Sequence[str], mapping: Mapping[str, str], given: Mapping[str, str], name: str, proposals: "_Proposals"
) -> list[Problem]:
    """What is wrong with a mapping by itself. The fix corrects all of it at once, if each part can be corrected.

    ``given`` is the mapping with what it ignores.
    """
    problems: list[Problem] = []
    corrected: dict[str, str] = {}
    known = tuple(dict.fromkeys(field for format in formats_of(proposals.wanted) for field in format.fields))
    for theirs, ours in given.items():
        if theirs not in mapping:
            corrected[theirs] = ours
            continue
        where = f"dataset_columns {theirs}={ours}"
        if theirs in known and theirs not in columns and ours in columns:
            problems.append(Problem(where, f"{ours!r} is the column, {theirs!r} the field", "column=field"))
            corrected[ours] = theirs
            continue
        column, field = theirs, ours
        if ours not in known:
            names = (*known, IGNORE)
            problems.append(Problem(where, f"{ours!r} is no field", ", ".join(names)))
            field = next(iter(get_close_matches(ours, names, n=1)), "")
        elif list(mapping.values()).count(ours) > 1:
            problems.append(Problem(where, f"{ours} is given twice", "one column for each field"))
            field = ""
        if theirs not in columns:
            problems.append(Problem(where, f"{name} has no column {theirs!r}", "one of " + ", ".join(columns)))
            free = [each for each in columns if each not in given]
            same = [each for each in free if each.lower() == theirs.strip().lower()]
            column = next(iter(same or get_close_matches(theirs, free, n=1)), "")
        if column in corrected or field in corrected.values():
            column = ""
        corrected[column] = field
    if not problems:
        return []
    is_whole = "" not in corrected and "" not in corrected.values() and len(corrected) == len(given)
    fix = f"did you mean {proposals.typed(corrected)}" if is_whole else proposals.text(name)
    return [*problems[:-1], replace(problems[-1], fix=fix)]


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


def mapping_of(
    columns: Sequence[str], rows: Sequence[Row], like: Sequence[str], wanted: Rows = "answers"
) -> tuple[str, dict[str, str] | None]:
    """Find a mapping with which the first rows of a file are read. Returns when it is right, and the mapping.

    The condition is empty for well-known names, the mapping if none is needed; it is None if no mapping is known.
    ``like`` are the fields of the format of the other files: strings are joined as text if theirs are.
    """
    proposals = _Proposals(columns, {}, rows, None, wanted)
    if complete := _complete(columns, {}, (), wanted):
        return "", ({} if proposals.misfit(complete[0]) is None else None)
    condition, mapping = proposals.first()
    if tuple(mapping.values()) == ("instruction", "output") and tuple(like) == ("prompt", "completion"):
        mapping = dict(zip(mapping, like, strict=True))
    return condition, dict(mapping) or None


def preferences(columns: Sequence[str]) -> tuple[str, str, bool] | None:
    """The two columns that hold two answers to one question, and whether the first is known to be better; else None."""
    theirs = {column.lower(): column for column in columns}
    for first, second, *third in (*BETTER, *EITHER):
        for column in theirs:
            words = re.split(r"_|(?<=[a-z])(?=\d$)", column)
            rest = [word for word in words if word != first]
            at = re.search(rf"(?<![a-z0-9]){first}(?![a-z0-9])|(?<=[a-z]){first}$", column)
            if at is None or len(rest) == len(words) or not ANSWER_WORDS.issuperset(rest):
                continue
            other, *more = (column[: at.start()] + word + column[at.end() :] for word in (second, *third))
            are_words = bool(rest) or len(first) > 1  # columns called a and b say nothing
            if are_words and other in theirs and not any(name in theirs for name in more):
                return theirs[column], theirs[other], not third
    return None


class _Proposals:
    """The flags to type for columns with well-known names. Each was tried with the first rows."""

    def __init__(
        self,
        columns: Sequence[str],
        ignored: Mapping[str, str],
        rows: Sequence[Row],
        among: Listed | None,
        wanted: Rows,
    ) -> None:
        self.wanted = wanted
        self._columns = columns
        self._ignored = ignored
        self._among = among
        self._rows = [without_keys(row, read_keys(ignored)) for row in rows]
        self._theirs = {column.lower(): column for column in columns}

    def for_misfit(self) -> str:
        """What to do about rows that do not fit the format of their columns; empty if it is not known."""
        return self._of_preferences() or self.best()

    def text(self, name: str) -> str:
        """What to do about columns that are no format, for a message. ``name`` is the data set's."""
        if fix := self._of_preferences() or self.best() or self._other_objectives():
            return fix
        if self.wanted != "answers":
            return f"say which column is which: {columns_flag({'COLUMN': 'FIELD'})}"
        if self._find(LISTS) or self._is_nested():
            return "none of the formats holds these rows: " + (self._of_tree() or CONVERT)
        return self._of_strings(name)

    def first(self) -> tuple[str, Mapping[str, str]]:
        """When a mapping reads the rows, and this mapping, as a message would name it first; empty if none is known."""
        return next(chain(self._mappings(), self._by_order()), ("", {}))

    def best(self) -> str:
        """The flag that reads the rows, and when to type it; empty if none is known."""
        if not (found := next(iter(self._mappings()), None)):
            return ""
        condition, mapping = found
        return f"{condition}: {self.flag(mapping)}" if condition else self.pair()

    def _mappings(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yield the mappings that work, best first, each with its condition; for a pair that is empty."""
        if self.wanted != "answers":
            yield from self._of_pairs() if self.wanted == "pairs" else self._of_labels()
            return
        for column in self._lists():
            for ours in ("messages", "conversations"):
                if self._works({column: ours}):
                    yield f"if {column} holds lists of messages", {column: ours}
        # By name only: other lists of strings may be choices, or several answers to one question.
        for column in self._named(LISTS):
            mapping = {column: "alternating_turns"}
            if self._works(mapping):
                yield f"if the turns of {column} alternate, the user first", mapping
        if chat := self._chat():
            yield "", chat
        question = self._find(QUESTIONS)
        for column in self._named(CALLS) if question else []:
            mapping = {question: "instruction", column: "tool_calls"}
            if self._works(mapping):
                yield f"if {question} asks and {column} calls tools", mapping
        for column in self._named(TEXTS):
            if self._works({column: "text"}):
                yield f"if {column} holds texts", {column: "text"}

    def _chat(self) -> dict[str, str]:
        """The mapping of columns that are well known as question and answer; empty if there are none."""
        question, answer = self._find(QUESTIONS), self._find(ANSWERS)
        if not answer:
            return {}
        context = next((column for column in self._named(CONTEXTS) if column != question), "")
        chat = {question: "instruction", answer: "output"}
        if context:
            chat = {question: "instruction", context: "input", answer: "output"}
        if question and self._works(chat):
            return chat
        # A list of messages that ends with the question.
        lists = ({column: "instruction", answer: "output"} for column in self._lists())
        return next((mapping for mapping in lists if self._works(mapping)), {})

    def pair(self) -> str:
        """The flag for columns that are well known as question and answer; empty if there are none."""
        chat = self._chat()
        if not chat:
            return ""
        question, answer = next(iter(chat)), next(reversed(chat))
        text = {question: "prompt", answer: "completion"}
        fix = f"if {question} asks and {answer} answers: {self.flag(chat)} makes a chat of each row"
        if question == self._find(QUESTIONS) and self._works(text) and len(chat) == 2:
            fix += f"; or {self.flag(text)} joins the two as plain text"
        read = self._with_context(chat)
        longer = [each for each in self._columns if each not in read and self._length(each) > self._length(answer)]
        for column in [each for each in longer if each.lower() in ("text", *TEXTS) and self._works({each: "text"})]:
            longer.remove(column)
            if column != "text":  # that one is named before
                fix += f"; or, if {column} is to be learned as a whole, {self.flag({column: 'text'})}"
        if longer:
            fix += f"; longer than {answer}, and not read: {', '.join(longer)} (map thoughts to reasoning_content)"
        return fix

    def flag(self, mapping: Mapping[str, str]) -> str:
        """The flag that gives ``mapping``, with what goes with it."""
        return self.typed({**self._with_context(mapping), **self._ignored})

    def typed(self, mapping: Mapping[str, str]) -> str:
        """The flag that gives exactly ``mapping``."""
        return self._among.with_columns(mapping) if self._among else columns_flag(mapping)

    def without(self, mapping: Mapping[str, str], theirs: str) -> str:
        """What to do about a column whose field does not go with the others: as a chat, or without it."""
        as_chat = {"prompt": "instruction", "completion": "output"}
        fixes = [
            self.typed({**changed, **self._ignored})
            for changed in (
                {each: as_chat.get(ours, ours) for each, ours in mapping.items()},
                {each: ours for each, ours in mapping.items() if each != theirs},
            )
            if self._works(changed)
        ]
        return "; or ".join(fixes)

    def misfit(self, fields: Mapping[str, str]) -> Problem | None:
        """The first problem of the first rows, if most of them do not fit the format ``fields``."""
        problems = [sample[0] for sample in (to_sample(row, fields) for row in self._rows) if isinstance(sample, list)]
        return problems[0] if len(problems) > len(self._rows) / 2 else None

    def _of_pairs(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yield the mappings of two answers to each question, as ``_mappings`` does."""
        if not (columns := preferences(self._columns)):
            return
        chosen, other, is_better = columns
        condition = "" if is_better else f"if {chosen} is always the better one"
        answers = {chosen: "chosen", other: "rejected"}
        question = self._find(QUESTIONS)
        for mapping in ({question: "instruction", **answers}, {question: "prompt", **answers}, answers):
            if "" not in mapping and self._works(mapping):
                yield condition, mapping

    def _of_labels(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yield the mappings of answers with a label, as ``_mappings`` does."""
        label, question, answer = self._find(LABELS), self._find(QUESTIONS), self._find(ANSWERS)
        for mapping in (
            {question: "instruction", answer: "completion", label: "label"},
            {question: "prompt", answer: "completion", label: "label"},
            *({column: "completion", label: "label"} for column in self._lists()),
        ):
            if "" not in mapping and label not in (question, answer) and self._works(mapping):
                yield "", mapping

    def objective(self) -> str:
        """The flags with which an objective learns from these rows; empty if none is known."""
        flag = f"--objective {OBJECTIVE_OF[self.wanted]}"
        complete = _complete(self._columns, {}, self._ignored, self.wanted)
        if complete and self.misfit(complete[0]) is None:
            return flag
        condition, mapping = next(self._mappings(), ("", {}))
        return f"{flag} {self.flag(mapping)}{f' ({condition})' if condition else ''}" if mapping else ""

    def _other_objectives(self) -> str:
        """What to do about rows that another objective learns from; empty if none does."""
        others = [
            _Proposals(self._columns, self._ignored, self._rows, self._among, kind)
            for kind in OBJECTIVE_OF
            if kind != self.wanted
        ]
        flags = [flag for flag in (other.objective() for other in others) if flag]
        wants = {"pairs": "pairs of a chosen and a rejected answer", "rated": "answers with a label"}
        need = f"{OBJECTIVE_OF[self.wanted]} needs {wants.get(self.wanted, 'answers')}"
        return f"{need}; these rows can be learned with {' or '.join(flags)}" if flags else ""

    def _of_preferences(self) -> str:
        """What to do about two answers to each question where answers are to be learned; empty if there are none."""
        if self.wanted != "answers" or not (columns := preferences(self._columns)):
            return ""
        chosen, other, is_better = columns
        question = self._find(QUESTIONS)
        mappings = (
            {chosen: "messages"},
            {chosen: "conversations"},
            {question: "instruction", chosen: "output"},
            {question: "prompt", chosen: "completion"},
        )
        mapping = next((mapping for mapping in mappings if "" not in mapping and self._works(mapping)), None)
        flags = _Proposals(self._columns, self._ignored, self._rows, self._among, "pairs").objective()
        pairs = f"preference pairs: {flags} learns from both answers" if flags else "preference pairs"
        if not is_better:
            fix = f"{pairs}; if now {chosen} and now {other} is better, write the better one into a column chosen"
            return f"{fix}; or, if {chosen} is always the better one, {self.flag(mapping)}" if mapping else fix
        if mapping:
            return f"{pairs}; {self.flag(mapping)} learns the chosen answers only"
        fix = pairs if flags else f"{pairs}; none of the formats holds the chosen answers as conversations: {CONVERT}"
        if self._works({chosen: "text"}):
            fix += f"; {self.flag({chosen: 'text'})} learns the chosen ones as plain text, the questions too"
        return fix

    def _of_strings(self, name: str) -> str:
        """What to do about columns whose names say nothing. ``name`` is the data set's."""
        fixes = [
            f"{condition}: {self.flag(mapping)}; other columns in the same way"
            for condition, mapping in self._by_order()
        ]
        if re.search(r"\.[ct]sv\b", name):
            fixes.append("the first line of a table must name its columns")
        return "; ".join(fixes) or f"say which column is which: {columns_flag({'COLUMN': 'FIELD'})}"

    def _by_order(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yield a mapping of the first columns that hold texts, whatever their names, and when it is right.

        A column that is named as answers are is the answer, and the longest of the others asks. Columns of numbers
        ask nothing: pandas writes the index of a table as its first column.
        """
        strings = [each for each in self._columns if any(isinstance(row.get(each), str) for row in self._rows)]
        while strings and all(re.fullmatch(r"\s*-?\d*\s*", str(row.get(strings[0]) or "")) for row in self._rows):
            strings.pop(0)
        if len(strings) > 1:
            asks, answers = strings[:2]
            if named := [each for each in self._named(ANSWERS) if each in strings]:
                answers = named[0]
                asks = max((each for each in strings if each != answers), key=self._length)
            condition, mapping = f"if {asks} asks and {answers} answers", {asks: "instruction", answers: "output"}
        elif strings:
            condition, mapping = f"if {strings[0]} holds texts", {strings[0]: "text"}
        else:
            return
        if self._works(mapping):
            yield condition, mapping

    def _works(self, mapping: Mapping[str, str]) -> bool:
        """Whether ``mapping`` makes samples of most of the first rows, and loses nothing of them."""
        complete = _complete(self._columns, self._with_context(mapping), self._ignored, self.wanted)
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
        format = next(each for each in formats_of(self.wanted) if set(mapping.values()) <= set(each.fields))
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
