"""The kinds of rows by their names, as objectives ask for them."""

from typing import TYPE_CHECKING

from kit.data.kinds.answers import AnswerRows
from kit.data.kinds.compared import ComparedRows
from kit.data.kinds.contrasts import ContrastRows
from kit.data.kinds.kind import RowKind
from kit.data.kinds.labelled import LabelledRows
from kit.data.kinds.pairs import PairRows
from kit.data.kinds.rated import RatedRows

if TYPE_CHECKING:
    from kit.config.settings.objective import ObjectiveSettings

# Those that others could read are last.
KINDS: dict[str, type[RowKind]] = {
    "pairs": PairRows,
    "rated": RatedRows,
    "labelled": LabelledRows,
    "contrasts": ContrastRows,
    "compared": ComparedRows,
    "answers": AnswerRows,
}


def kind_of(settings: "ObjectiveSettings") -> RowKind:
    """Return the kind of rows that the objective asks for, with what ``settings`` say of it."""
    return KINDS[settings.declared.rows].of(settings)
