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
from kit.data.chat.preferences import is_transcript
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
CONVERT_PAIR = (
    'convert each row to {"prompt": [{"role": "user", "content": "..."}], "chosen": [{"role": "assistant", ...}], '
    '"rejected": [{"role": "assistant", ...}]}'
)

Row = Mapping[str, Any]
# Of each kind of rows an objective that learns from it, and from what, for messages. What says most of the rows first.
OBJECTIVES: dict[Rows, tuple[str, str]] = {
    "pairs": ("dpo", "learns from pairs of answers"),
    "rated": ("kto", "learns from answers with a label"),
    "answers": ("sft", "learns the answers"),
}


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
    proposals = _Proposals(columns, ignored, list(islice(rows, NUM_TRIED)), among, wanted, bool(mapping))
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
    if not problem and (fix := proposals.for_unread_question(fields)):
        found = f"columns {', '.join(columns)}, of which none is read as the prompt"
        raise UserError(Problem(name, found, "a mapping that says which", fix))
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


def flags_for_pairs(columns: Sequence[str], mapping: Mapping[str, str], rows: Sequence[Row]) -> str:
    """Return the flags with which an objective learns from pairs of answers in these rows; empty if there are none.

    ``mapping`` is what the user has given, instead of which the flags will be typed.
    """
    ignored = {theirs: ours for theirs, ours in mapping.items() if ours == IGNORE}
    columns = [column for column in columns if column not in ignored]
    proposals = _Proposals(columns, ignored, rows, None, "pairs", len(mapping) > len(ignored))
    return proposals.objective() if preferences(columns) else ""


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
        replaces: bool = False,
    ) -> None:
        """
        Args:
            replaces: the user has given a mapping, instead of which a flag will be typed.
        """
        self.wanted = wanted
        self._replaces = replaces
        self._columns = columns
        self._ignored = ignored
        self._among = among
        self._rows = [without_keys(row, read_keys(ignored)) for row in rows]
        self._theirs = {column.lower(): column for column in columns}

    def for_misfit(self) -> str:
        """What to do about rows that do not fit the format of their columns; empty if it is not known."""
        return self._of_preferences() or self.best()

    def for_unread_question(self, fields: Mapping[str, str]) -> str:
        """What to do about a question that is not read, where ``fields`` make the prompt of what two texts share."""
        samples = [sample for row in self._rows if isinstance(sample := to_sample(row, fields), dict)]
        prompts = [sample.get("prompt") for sample in samples]
        is_shared = all(isinstance(prompt, str) and not is_transcript(prompt) for prompt in prompts)
        if self.wanted == "answers" or not samples or not is_shared or {"prompt", "instruction"} & fields.keys():
            return ""
        fix = self.best()
        mapping = next(self._mappings(), ("", {}))[1]
        question = next((theirs for theirs, ours in mapping.items() if ours in ("prompt", "instruction")), "")
        if not question:
            return ""
        kept = {theirs: ours for ours, theirs in fields.items() if theirs != ours and theirs in self._columns}
        without = self.typed({**kept, **self._ignored, question: IGNORE})
        return f"{fix}; or, if both texts begin with the question, {without}"

    def text(self, name: str) -> str:
        """What to do about columns that are no format, for a message. ``name`` is the data set's."""
        if fix := self._of_preferences() or self.best() or self._other_objectives():
            return fix
        if self.wanted == "pairs" and preferences(self._columns):
            return f"none of the formats holds these rows: {CONVERT_PAIR}"
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
        if self.wanted == "answers":
            return f"{condition}: {self.flag(mapping)}" if condition else self.pair()
        if set(mapping.values()) >= {IGNORE} and not condition:  # two prompts
            kept, ignored = ("instruction", "prompt") if mapping.get("prompt") == IGNORE else ("prompt", "instruction")
            other = {**{t: o for t, o in mapping.items() if o != IGNORE}, kept: IGNORE}
            return f"{self.flag(mapping)} takes {kept}; or {self.flag(other)} takes {ignored}"
        fix = f"{condition}: {self.flag(mapping)}" if condition else self.flag(mapping)
        as_text = {theirs: "prompt" if ours == "instruction" else ours for theirs, ours in mapping.items()}
        samples = self._samples(as_text) if as_text != mapping and self._works(as_text) else []
        if samples and isinstance(samples[0]["prompt"], str):
            fix += f" makes a chat of each row; or {self.flag(as_text)} joins the texts"
        return fix

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
        """The flag that gives ``mapping``, with what goes with it; empty if none is needed."""
        whole = self._with_context(mapping)
        if self.wanted != "answers":  # a single format: its own names choose nothing
            whole = {theirs: ours for theirs, ours in whole.items() if theirs != ours} or whole
            if not self._replaces and all(theirs == ours for theirs, ours in whole.items()):
                return ""
        return self.typed({**whole, **self._ignored})

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
        for mapping in (*self._with_questions(answers), answers):
            if self._works(mapping):
                yield condition, mapping
        # A prompt that is there in another form at the beginning of the answers, or one of two prompts.
        for column in self._columns:
            mapping = {**answers, column: IGNORE}
            if column in ("prompt", "instruction") and self._works(mapping):
                has_other = {"prompt", "instruction"} <= set(self._columns)
                yield "" if has_other else f"if {chosen} and {other} begin with the prompt", mapping

    def _of_labels(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yield the mappings of answers with a label, as ``_mappings`` does."""
        label = self._find(LABELS)
        for answer in dict.fromkeys((*self._named(ANSWERS), *self._lists())) if label else ():
            answers = {answer: "completion", label: "label"}
            for mapping in (*self._with_questions(answers), answers):
                if self._works(mapping):
                    yield "", mapping

    def _with_questions(self, answers: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
        """Yield ``answers`` with each column that may hold their prompts: by its name, or as a list of messages."""
        context = next(iter(self._named(CONTEXTS)), "")
        for column in dict.fromkeys((self._find(QUESTIONS), *self._lists())):
            if not column or column in answers or {"prompt", "instruction"} & (set(self._columns) - {column}):
                continue
            if context not in ("", column, *answers):
                yield {column: "instruction", context: "input", **answers}
            are_lists = any(isinstance(listed(row.get(column)), list) for row in self._rows)
            for ours in ("prompt", "instruction") if are_lists else ("instruction", "prompt"):
                yield {column: ours, **answers}

    def objective(self) -> str:
        """The flags with which an objective learns from these rows; empty if none is known."""
        flag = f"--objective {OBJECTIVES[self.wanted][0]}"
        complete = _complete(self._columns, {}, self._ignored, self.wanted)
        if complete and not self.misfit(complete[0]) and not self.for_unread_question(complete[0]):
            own = {name: name for name in complete[0].values() if name in self._columns}
            if not self._loses(own):
                needs_none = self.wanted == "answers" and not self._replaces
                return flag if needs_none else f"{flag} {self.flag(own)}".rstrip()
        mappings = self._mappings()
        if self.wanted == "answers" and preferences(self._columns):
            mappings = iter([("", self._better_only())])
        for condition, mapping in mappings:
            if mapping and not self._loses(mapping):
                return (
                    f"{condition}, {flag} {self.flag(mapping)}"
                    if condition
                    else f"{flag} {self.flag(mapping)}".rstrip()
                )
        return ""

    def _for(self, wanted: Rows) -> "_Proposals":
        """What would be proposed if another kind of rows were wanted."""
        return _Proposals(self._columns, self._ignored, self._rows, self._among, wanted, self._replaces)

    def _other_objectives(self) -> str:
        """What to do about rows that another objective learns from; empty if none does."""
        others = {wanted: self._for(wanted).objective() for wanted in OBJECTIVES if wanted != self.wanted}
        fixes = [f"{flags} {OBJECTIVES[wanted][1]}" for wanted, flags in others.items() if flags]
        if not fixes or not self._among or not self._among.keeps_objective:
            return "; or ".join(fixes)
        if flag := self._among.left_out():
            return f"{flag} leaves it out: one objective learns from all data sets"
        return "--eval_dataset null --eval_split_size 0.05 evaluates on some of the training data, held out"

    def _of_preferences(self) -> str:
        """What to do about two answers to each question where answers are to be learned; empty if there are none."""
        if self.wanted != "answers" or not (columns := preferences(self._columns)):
            return ""
        chosen, other, is_better = columns
        fixes = []
        keeps_objective = self._among is not None and self._among.keeps_objective
        if not keeps_objective and (flags := self._for("pairs").objective()):
            fixes.append(f"{flags} learns from both answers")
        if mapping := self._better_only():
            is_text = "text" in mapping.values()
            what = f"{chosen} only, as plain text with its question" if is_text else f"the answers in {chosen} only"
            fixes.append(f"{self.flag(mapping)} learns {what}")
        if not fixes:
            return f"preference pairs, and none of the formats holds them: {CONVERT_PAIR}"
        if not is_better:
            fixes.append(f"if {other} is the better one in some rows, write the better one into a column chosen")
        return "; or ".join(fixes)

    def _better_only(self) -> Mapping[str, str]:
        """The mapping that reads the better one of two answers to each question; empty if none is known."""
        chosen, other, _ = preferences(self._columns) or ("", "", True)
        question = self._find(QUESTIONS)
        for mapping in (
            {chosen: "messages"},
            {chosen: "conversations"},
            {question: "instruction", chosen: "output"},
            {question: "prompt", chosen: "completion"},
        ):
            if "" not in mapping and self._works(mapping):
                return mapping
        begins_with_question = self._for("pairs")._works({chosen: "chosen", other: "rejected"})
        return {chosen: "text"} if begins_with_question and self._works({chosen: "text"}) else {}

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
        return len(self._samples(mapping)) > len(self._rows) / 2

    def _samples(self, mapping: Mapping[str, str]) -> list[Sample]:
        """The samples that ``mapping`` makes of the first rows, of those of which nothing is lost."""
        if not (read := self._read_by(mapping)):
            return []
        fields, unused = read
        made = ((row, to_sample(row, fields)) for row in self._rows)
        return [each for row, each in made if isinstance(each, dict) and _asks(each) and not unused.check(row)]

    def _loses(self, mapping: Mapping[str, str]) -> bool:
        """Whether ``mapping`` would lose something of any of the first rows, such as that an answer is a bad one."""
        read = self._read_by(mapping)
        return read is None or any(read[1].check(row) for row in self._rows)

    def _read_by(self, mapping: Mapping[str, str]) -> tuple[dict[str, str], Unused] | None:
        """The columns that ``mapping`` reads, by our names, and what finds the others; None if it makes no format."""
        ignored = {*self._ignored, *(theirs for theirs, ours in mapping.items() if ours == IGNORE)}
        columns = [column for column in self._columns if column not in ignored]
        mapping = {theirs: ours for theirs, ours in mapping.items() if theirs not in ignored}
        complete = _complete(columns, self._with_context(mapping), ignored, self.wanted)
        if not complete or not set(mapping.values()) <= set(complete[0]):
            return None
        return complete[0], Unused(complete[0], ignored)

    def _with_context(self, mapping: Mapping[str, str]) -> dict[str, str]:
        """``mapping`` with the columns of system prompts and tools that its format takes, under other names."""
        named = set(mapping.values()) - {IGNORE}
        format = next(each for each in formats_of(self.wanted) if named <= set(each.fields))
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
