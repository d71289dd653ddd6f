"""JSON text to values, without losing a value unseen: a key that an object has twice is an error.

Python's own parser keeps the last value of such a key and drops the others. Equal values are no error. Pure.
"""

import json
from typing import Any


class RepeatedKey(ValueError):
    """An object in JSON text has a key twice, with different values."""

    def __init__(self, key: str) -> None:
        self.found = f"an object has the key {key[:80]!r} twice, with different values"
        self.expected = "each key once: one of the values would be lost"
        super().__init__(self.found)


def _to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    # As JSON, because Python takes 1, 1.0 and true for equal.
    if lost := [key for key, value in pairs if json.dumps(value) != json.dumps(made[key])]:
        raise RepeatedKey(lost[0])
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
