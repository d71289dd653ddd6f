"""Chooses the columns of a data set to read. Pure.

Promises: a format is chosen only by the kit's own names, or by the user's mapping. Names that are well known elsewhere
are proposed as the flag to type, never guessed.
"""

from collections.abc import Mapping, Sequence

from kit.data.chat.formats import FIELDS, FORMATS, IGNORE
from kit.errors import Problem, UserError, did_you_mean, raise_if

# Names of columns that are well known elsewhere.
QUESTIONS = tuple(
    "question query instruction prompt problem input user human source article document dialogue context text".split()
)
ANSWERS = tuple(
    "answer response output completion solution reply assistant gpt bot chatgpt target summary highlights".split()
)
CONTEXTS = ("input", "context")  # more text beside an instruction
LISTS = tuple("conversation dialog dialogs chat chats turns message".split())  # may hold lists of messages
TEXTS = tuple("content document article body sentence code story".split())


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

    What ``mapping`` maps to ``IGNORE`` is treated as absent.

    Raises ``UserError`` if no format fits, or if ``mapping`` names an unknown field or a column that is not there.
    """
    ignored = {theirs for theirs, ours in mapping.items() if ours == IGNORE}
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
            fix = f"the other way round: --dataset_columns {ours}={theirs}"
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
    if not complete:
        fix = _proposal(columns) or "say which column is which: --dataset_columns column=field,column=field"
        if "chosen" in columns and "rejected" in columns:
            ours = "completion" if "prompt" in columns else "messages"
            fix = f"preference pairs are not trained on here; --dataset_columns chosen={ours} takes the chosen answers"
        raise UserError(Problem(name, f"columns {', '.join(columns)}", ", or ".join(map(str, FORMATS)), fix))
    for theirs, ours in mapping.items():
        if ours not in complete[0]:
            found = f"{ours} does not go with {' and '.join(complete[0])}"
            problems.append(Problem(f"dataset_columns {theirs}={ours}", found, "fields of one format"))
    raise_if(problems)
    fix = _proposed_pair(columns)
    if "text" in complete[0] and not mapping and fix:
        found = f"columns {', '.join(columns)}: texts to learn as a whole, or questions with answers"
        raise UserError(Problem(name, found, "a mapping that says which", f"{fix}; texts: --dataset_columns text=text"))
    return complete[0]


def _complete(columns: Sequence[str], mapping: Mapping[str, str], ignored: set[str]) -> list[dict[str, str]]:
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


def _proposal(columns: Sequence[str]) -> str:
    """The flag to type for columns with well-known names, for a message; empty if none of them is known."""
    pair = _proposed_pair(columns)
    if pair:
        return pair
    for words, ours, held in ((LISTS, "messages", "lists of messages"), (TEXTS, "text", "texts")):
        for column in columns:
            if column.lower() in words:
                return f"if {column} holds {held}: --dataset_columns {column}={ours}"
    return ""


def _proposed_pair(columns: Sequence[str]) -> str:
    """The flag for columns that are well known as question and answer; empty if there are none."""
    theirs = {column.lower(): column for column in columns}
    answer = next((theirs[word] for word in ANSWERS if word in theirs), "")
    question = next((theirs[word] for word in QUESTIONS if word in theirs), "")
    if not question or not answer:
        return ""
    context = next((theirs[word] for word in CONTEXTS if word in theirs), "")
    if context and question.lower() == "instruction":
        flag = f"{question}=instruction,{context}=input,{answer}=output"
    else:
        flag = f"{question}=prompt,{answer}=completion"
    return f"if {question} asks and {answer} answers: --dataset_columns {flag}"
