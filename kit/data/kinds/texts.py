"""Rows for reward models, classifiers and embedding models, which pool hidden states of a text. Pure.

A text, or a pair of texts, is tokenised by the model's own tokenizer (``plain``), as ``pipeline`` of transformers and
sentence-transformers do.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kit.data.chat.formats import Sample
from kit.data.chat.messages import parsed
from kit.data.chat.tokens import Encoded
from kit.data.kinds.kind import START_CUT, Limits, RowKind, Sequences, Stored
from kit.system.errors import Problem, UserError

_NO_LIST = re.compile(r"""\s*\[([^\W\d][^,'"\[\]]*\]|[^'"\[\]]*\]\s*\S)""")  # [PER], [1] and more, [a, b] and more


@dataclass(frozen=True)
class TextRows(RowKind):
    """Texts that are encoded alone.

    Attributes:
        pooling: ``last`` takes the hidden state of the last token, ``mean`` the mean of all.
    """

    pooling: str = "last"
    pools = True
    token_name = "pooled"

    def parts(self, sample: Sample) -> list[Sample]:
        """See ``RowKind``."""
        return [{"plain": texts} for texts in sample["plain"]] if "plain" in sample else [sample]

    def join(self, sample: Sample, encoded: Sequence[list[Encoded] | Problem]) -> list[Sequences] | Problem:
        """See ``RowKind``."""
        texts: Sequences = ()
        for each in encoded:
            if isinstance(each, Problem):
                return each
            if not each[0].input_ids:
                return Problem("", "a text without a token", "text")
            texts += (each[0],)
        return [texts]

    def cut(self, sequences: Sequences, limits: Limits) -> tuple[list[Sequences], str]:
        """See ``RowKind``: each text in its middle, or at its start."""
        cut = tuple(_shortened(each, limits) for each in sequences)
        return [cut], START_CUT if limits.strategy == "keep_end" else ""

    def weighted(self, sample: Sample, sequences: Sequences) -> Sequences | None:
        """See ``RowKind``: 1 for the tokens whose hidden states are pooled."""
        last = self.pooling == "last"
        return tuple(
            replace(each, weights=[0.0 if last else 1.0] * (len(each.input_ids) - 1) + [1.0]) for each in sequences
        )

    def values(self, sample: Sample, sequences: Sequences) -> list[float]:
        """See ``RowKind``: no answer is generated."""
        return []

    def per_sequence(self, table: Stored, members: np.ndarray, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """See ``RowKind``: ``values``, float32 [n, L], and ``roles``, int64 [n], the number of each in its sample."""
        return {"values": table.values[members].astype(np.float32), "roles": numbers}


def _shortened(encoded: Encoded, limits: Limits) -> Encoded:
    """Cut a text in its middle, or at its start after the first token. The special tokens that end it stay."""
    ids, max_length = encoded.input_ids, limits.max_length
    if len(ids) <= max_length:
        return encoded
    if limits.strategy == "keep_end":
        first = 1 if ids[0] in limits.special else 0
        kept = ids[:first] + ids[len(ids) - max_length + first :]
    else:
        num_last = next(i for i, id_ in enumerate(reversed([None, *ids])) if id_ not in limits.special)
        num_last = min(num_last, max_length - 1)
        kept = ids[: max_length - num_last] + ids[len(ids) - num_last :]
    return Encoded(kept, [1.0] * max_length)


def negatives(values: Mapping[str, Any]) -> dict[str, Any]:
    """The texts in the column ``negative``, each with its name: one, a list of them, or none."""
    given = as_list("negative", values.get("negative"))
    if isinstance(given, list):
        return {f"negative[{i}]": each for i, each in enumerate(given)}
    return {} if given is None else {"negative": given}


def as_list(name: str, value: Any) -> Any:
    """A value, as a list if it is a JSON string of one. Raises ``UserError`` for a string that only looks like one."""
    is_list = isinstance(value, str) and value.lstrip().startswith("[") and not _NO_LIST.match(value)
    return parsed(name, value) if is_list else value


def number(where: str, value: Any) -> float:
    """A number, also of a cell of a table. Raises ``UserError`` if it is none, or not finite in float32."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if isinstance(value, bool) or not abs(found) < 3.4e38:  # the largest of float32; false for NaN
        raise UserError(where, repr(value)[:80], "a number")
    return found
