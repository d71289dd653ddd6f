"""Contrasts: a text, one that belongs to it, and any number of others that do not; each is embedded alone."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from kit.data.chat.formats import Format, Sample
from kit.data.chat.messages import check_text
from kit.data.kinds.kind import Stored
from kit.data.kinds.texts import TextRows, negatives

if TYPE_CHECKING:
    from kit.config.settings.objective import ObjectiveSettings


def _read(values: Mapping[str, Any]) -> Sample:
    texts = {"anchor": values["anchor"], "positive": values["positive"], **negatives(values)}
    return {"plain": [[check_text(name, text)] for name, text in texts.items()]}


class ContrastRows(TextRows):
    """Sequence 0 is the text, 1 the one that belongs to it."""

    formats = (Format(("anchor", "positive"), _read, optional=("negative",)),)
    objective = "--objective embed learns which texts belong to each other"

    @classmethod
    def of(cls, settings: "ObjectiveSettings") -> Self:
        """See ``RowKind``."""
        return cls(settings.pooling)

    def names(self, table: Stored, i: int) -> list[str]:
        """See ``RowKind``."""
        return ["anchor", "positive", *["negative"] * (np.count_nonzero(table.sequence_lengths[i]) - 2)]


KIND = ContrastRows
