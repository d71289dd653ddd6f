"""Contrastive rows for embedding models: anchor, positive, and any number of hard negatives."""

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


class ContrastiveRows(TextRows):
    """Sequence 0 is the anchor, 1 the positive, the others are hard negatives."""

    formats = (Format(("anchor", "positive"), _read, optional=("negative",)),)
    objective = "--objective embed takes contrastive rows"

    @classmethod
    def of(cls, settings: "ObjectiveSettings") -> Self:
        """See ``RowKind``."""
        return cls(settings.pooling)

    def names(self, table: Stored, i: int) -> list[str]:
        """See ``RowKind``."""
        return ["anchor", "positive", *["negative"] * (np.count_nonzero(table.sequence_lengths[i]) - 2)]


KIND = ContrastiveRows
