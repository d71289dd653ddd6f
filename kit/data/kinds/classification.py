"""Classification rows: a text, a pair of texts or a conversation, with the names of its labels, or with numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from kit.data.chat.formats import Format, Sample
from kit.data.chat.messages import check_text, read_messages
from kit.data.kinds.kind import Sequences
from kit.data.kinds.texts import TextRows, as_list, number
from kit.system.errors import Problem, UserError, listed

if TYPE_CHECKING:
    from kit.config.settings.objective import ObjectiveSettings

MULTI_HOT = "of a multi-hot list, write the places of its ones, from 0: [1, 2] for [0, 1, 1]"


def _read(values: Mapping[str, Any]) -> Sample:
    label = values["label"]
    if "messages" in values:
        messages = read_messages("messages", values["messages"], needs_answer=False)
        return {"messages": [each | {"weight": 0} for each in messages], "label": label}  # without generation prompt
    columns = [name for name in ("text", "query", "document") if name in values]
    return {"plain": [[check_text(name, values[name]) for name in columns]], "label": label}


def label_names(value: Any) -> tuple[list[str], bool]:
    """Return the names of the labels in a column, and whether it may hold several. Raises ``UserError``."""
    value = as_list("label", value)
    if not isinstance(value, list):
        return [_name("label", value)], False
    names = [_name(f"label[{i}]", each) for i, each in enumerate(value)]
    if len(set(names)) < len(names) or any(isinstance(each, bool | float) for each in value):
        expected = "the names or the numbers of its labels, each once"
        raise UserError("label", repr(value)[:80], expected, MULTI_HOT)
    return names, True


def label_numbers(value: Any) -> list[float]:
    """Return the number in a column, or the numbers of its list. Raises ``UserError``."""
    value = as_list("label", value)
    if value == []:
        raise UserError("label", "an empty list", "one number or more")
    return [number("label", each) for each in (value if isinstance(value, list) else [value])]


def _name(where: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    if isinstance(value, float):
        raise UserError(where, repr(value), "the name or the number of a label; or --problem_type regression")
    return check_text(where, value).strip()


@dataclass(frozen=True)
class ClassificationRows(TextRows):
    """Values: the numbers of its labels; of regression, the numbers themselves, one for each of ``labels``.

    Attributes:
        labels: that rows may have; numbers stand for them if they are names. Without any, none is stored.
        problem_type: see ``ClassifySettings``.
    """

    labels: tuple[str, ...] = ()
    problem_type: str | None = None
    formats = (
        Format(("label", "messages"), _read),
        Format(("label", "text"), _read),
        Format(("label", "query", "document"), _read),
    )
    objective = "--objective classify takes texts with labels"

    @classmethod
    def of(cls, settings: "ObjectiveSettings") -> Self:
        """See ``RowKind``."""
        return cls(labels=tuple(settings.labels or ()), problem_type=settings.problem_type)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """The number of each label, by what may stand for it."""
        known = {name: i for i, name in enumerate(self.labels)}
        if any(map(str.isdecimal, self.labels)):
            return known
        return {str(i): i for i in known.values()} | known

    def check(self, sample: Sample) -> Problem | None:
        """See ``RowKind``."""
        try:
            self.values(sample, ())
        except UserError as error:
            return error.problems[0]
        return None

    def values(self, sample: Sample, sequences: Sequences) -> list[float]:
        """See ``RowKind``. Raises ``UserError``, which ``check`` has returned before."""
        if self.problem_type == "regression":
            found, num, fix = label_numbers(sample["label"]), len(self.labels), ""
        else:
            names, _ = label_names(sample["label"])
            if not self.labels:
                return []
            if unknown := [name for name in names if name not in self._numbers]:
                expected = (
                    f"one of {listed(self.labels)}, or --labels with the names of all, in the order of its scores"
                )
                raise UserError("label", f"{unknown[0]!r} is no label of this model", expected)
            found, num = [float(self._numbers[name]) for name in names], 1
            fix = "for any number of names, --problem_type multi_label_classification"
        if len(found) != num and self.problem_type != "multi_label_classification":
            raise UserError("label", f"{len(found)} in its list", f"{num}, as other rows have", fix)
        return found


KIND = ClassificationRows
