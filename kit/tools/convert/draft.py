"""What the file of another kit becomes: settings with a comment each, and what was left out, in three groups.

Promises: no credential of the file reaches the recipe; every key of the file ends in one of four places, so nothing
is lost in silence: a setting, a group of what was left out, a problem, or it asked for nothing (null, empty, or a
switch that is off).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kit.errors import Problem

_SECRET = re.compile(r"api_?key|(hub|hf|auth|access)_token|secret|passw", re.IGNORECASE)  # keys that hold credentials


class Group(Enum):
    """What leaving out a key changes."""

    NEEDLESS = "needless here"
    SPEED = "changes only speed or memory"
    LEARNS = "changes what is learned"


@dataclass(frozen=True)
class LeftOut:
    """A key that has no setting here."""

    key: str
    value: Any
    group: Group
    reason: str


@dataclass
class Draft:
    """A recipe in the making.

    Attributes:
        given: the keys of the file that were not read yet.
        values: our settings.
        notes: a comment for some of them.
        left_out: keys without a setting here.
        other_kind: what nothing can help: another kind of training.
        problems: what no ``--drop`` can help, but a setting that is typed: a file that is missing, ...
        num_processes: over all machines.
        config: the Accelerate config that the file asks for; empty: by the number of processes.
        template: the text of a chat template that the file holds; it gets a file of its own.
        typed: our settings that the user gave; they win.
        names: what the file calls keys that were given the name of transformers' Trainer.
        sources: the key of the file that a setting of ours was renamed from.
    """

    given: dict[str, Any]
    num_processes: int = 1
    values: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    other_kind: list[Problem] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    config: str = ""
    template: str = ""
    typed: Mapping[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def take(self, key: str, default: Any = None) -> Any:
        """Remove a key and return its value; ``default`` if it is absent, null or empty."""
        value = self.given.pop(key, None)
        return default if is_nothing(value) else value

    def take_first(self, *keys: str) -> Any:
        """Remove several names of one thing, and return the first value."""
        values = [self.take(key) for key in keys]
        return next((value for value in values if value is not None), None)

    def is_on(self, key: str) -> bool:
        """Remove a switch, and return whether it is on."""
        return is_true(self.take(key))

    def put(self, name: str, value: Any, note: str = "") -> None:
        """Set one of our settings, with a comment."""
        self.values[name] = value
        self.notes.pop(name, None)
        if note:
            self.notes[name] = note

    def rename(self, names: Mapping[str, str]) -> None:
        """Set our settings from those with another name and the same meaning."""
        for theirs, ours in names.items():
            if (value := self.take(theirs)) is not None:
                self.put(ours, value)
                self.sources[ours] = theirs

    def default(self, name: str, value: Any, kit: str) -> None:
        """Set what the other kit does where its file says nothing."""
        if name not in self.values:
            self.put(name, value, f"the default of {kit}")

    def drop(self, key: str, value: Any, group: Group, reason: str, name: str = "") -> None:
        """Leave a key out. ``name``: a setting that was typed instead of it, if it was, so nothing is lost."""
        if name not in self.typed:
            first, dot, rest = key.partition(".")
            key = f"{self.names.get(first, first)}{dot}{rest}"
            value = "***" if _SECRET.search(key) else value
            self.left_out.append(LeftOut(key, value, group, reason))

    def needless(self, key: str, reason: str) -> None:
        """Leave a key out that needs no setting here, if it asks for something."""
        if (value := self.take(key)) not in (None, False):
            self.drop(key, value, Group.NEEDLESS, reason)

    def speed(self, key: str, reason: str) -> None:
        """Leave a key out that changes only speed or memory, if it asks for something."""
        if (value := self.take(key)) not in (None, False):
            self.drop(key, value, Group.SPEED, reason)

    def refuse(self, key: str, value: Any, reason: str, name: str = "") -> None:
        """Add a problem that no ``--drop`` can help. ``name``: a setting that settles it, if it was typed."""
        if name not in self.typed:
            found = reason if value is None else f"found {shown(value)}: {reason}"
            (self.problems if name else self.other_kind).append(Problem(key, found))


def is_nothing(value: Any) -> bool:
    """Whether a value asks for nothing: null, or empty."""
    return value in (None, [], {}) or (isinstance(value, str) and value.strip().lower() in ("", "null", "none", "~"))


def is_true(value: Any) -> bool:
    """Whether a switch is on, as YAML or a command line has it."""
    return value is True or str(value).strip().lower() in ("true", "yes", "on", "1")


def is_false(value: Any) -> bool:
    """Whether a switch is off."""
    return value is False or str(value).strip().lower() in ("false", "no", "off")


def as_list(value: Any) -> list[Any]:
    """A list as it is, a string split at commas, and one value as a list of it."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def number(value: Any) -> float:
    """A number in YAML, where 2e-5 is a string. Raises ``ValueError`` for any other value."""
    try:
        return float(value)
    except TypeError:
        raise ValueError(value) from None


def shown(value: Any) -> str:
    """A value, shortened for a message."""
    text = str(value).replace("\n", " ")
    return text if len(text) <= 60 else f"{text[:57]}..."
