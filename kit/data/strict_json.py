"""JSON text to values, without losing a value unseen: a key that an object has twice is an error.

Python's own parser keeps the last value of such a key and drops the others. Pure.
"""

import json
from typing import Any


class RepeatedKey(ValueError):
    """An object in JSON text has a key twice."""

    def __init__(self, key: str) -> None:
        self.found = f"an object has the key {key[:80]!r} twice"
        self.expected = "each key once: of two values one would be lost"
        super().__init__(self.found)


def _to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise RepeatedKey(next(key for i, key in enumerate(keys) if key in keys[:i]))
    return made


_strict = json.JSONDecoder(object_pairs_hook=_to_dict)
_lenient = json.JSONDecoder()


def decode(text: str, start: int = 0) -> tuple[Any, int]:
    """Parse the JSON value that begins at ``text[start]``. Returns it and where it ends.

    Instead of a value in which a key is repeated, a ``RepeatedKey`` is returned, not raised: what follows it can be
    parsed. Raises what ``json.JSONDecoder.raw_decode`` raises.
    """
    try:
        return _strict.raw_decode(text, start)
    except RepeatedKey as error:
        return error, _lenient.raw_decode(text, start)[1]


def parse(text: str) -> Any:
    """Parse a JSON text. Raises ``RepeatedKey``, and what ``json.loads`` raises."""
    return _strict.decode(text)
