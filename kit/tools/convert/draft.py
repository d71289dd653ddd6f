"""The draft of a recipe from the file of another kit: settings with comments, and what was left out, in three groups.

Promises: no credential of the file reaches the recipe; every key of the file ends in one of four places, so nothing
is lost in silence: a setting, a group of what was left out, a problem, or it asked for nothing (null, empty, or a
switch that is off).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from kit.config.other_kits import KITS, NOTHING, OFF, meaning, table_of
from kit.config.recipe import Recipe
from kit.system.errors import Problem

_SECRET = re.compile(r"api_?key|(hub|hf|auth|access)_token|secret|passw", re.IGNORECASE)  # keys that hold credentials


class Group(Enum):
    """What leaving out a key changes."""

    NEEDLESS = "not needed here"
    SPEED = "changes only speed or memory"
    TRAINING = "changes training"


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
        kit: whose file it is.
        given: the keys of the file that were not read yet.
        path: of the file.
        lines: of all keys of the file.
        typed: our settings that the user gave; they win.
        num_processes: over all machines.
        values: our settings.
        notes: a comment for some of them.
        sources: the key of the file that a setting of ours comes from.
        left_out: keys without a setting here.
        refused: problems that no setting can fix: another kind of training.
        problems: those that a flag can fix: a missing file, ...
        config: the Accelerate config that the file asks for; empty: by the number of processes.
        sequence_parallel: size of the sequence-parallel groups.
        has_images: whether rows have them.
        keeps_dropout: whether this trainer of the kit leaves dropout as it is, with any objective.
    """

    kit: str
    given: dict[str, Any]
    path: Path
    lines: Mapping[str, int] = field(default_factory=dict)
    typed: Mapping[str, Any] = field(default_factory=dict)
    num_processes: int = 1
    values: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    refused: list[Problem] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    config: str = ""
    sequence_parallel: int = 1
    has_images: bool = False
    keeps_dropout: bool = False

    @property
    def table(self) -> dict[str, Any]:
        """The kit's own table."""
        return table_of(KITS[self.kit])

    @property
    def objective(self) -> str:
        """What the run minimises, as far as it was read."""
        return str({**self.values, **self.typed}.get("objective", "sft"))

    def take(self, key: str, default: Any = None) -> Any:
        """Remove a key and return its value; ``default`` if it is absent, null or empty."""
        value = self.given.pop(key, None)
        return default if is_nothing(value) else value

    def put(self, name: str, value: Any, note: str = "") -> None:
        """Set one of our settings, with a comment."""
        self.values[name] = value
        self.notes[name] = note

    def leave(self, key: str, value: Any, reason: str, group: Group = Group.TRAINING) -> None:
        """Leave a key out."""
        self.left_out.append(LeftOut(key, "***" if _SECRET.search(key) else value, group, reason))

    def refuse(self, key: str, value: Any, reason: str) -> None:
        """Add a problem that a flag can fix."""
        self.problems.append(Problem(key, f"found {shown(value)}: {reason}"))

    def read(self, *keys: str) -> None:
        """Read some keys by the tables of ``kit.config.other_kits``; our own settings stay as they are."""
        for key in keys:
            value = self.given.pop(key, None)
            found = meaning(key, value, self.kit)
            if is_nothing(value) or (found is None and is_false(value) and key not in Recipe.model_fields):
                continue
            if found is None and key in Recipe.model_fields:
                self.put(key, value)
            elif found is None:
                self.leave(key, value, "unknown key")
            elif found.kind == "settings":
                for name, setting in found.settings.items():
                    self.put(name, setting)
                    self.sources[name] = key
            elif found.kind == "refused":
                self.refused.append(Problem(key, f"found {shown(value)}", fix=found.text))
            elif found.kind != "nothing":
                self.leave(key, value, found.text, Group[found.kind.upper()])

    def put_defaults(self) -> None:
        """Set what the kit does where its file says nothing."""
        defaults = dict(self.table["defaults"])
        if self.values["method"] != "full" and not {"adapter_name_or_path", "adapter_type"} & set(self.values):
            defaults |= self.table.get("adapter_defaults", {})
        for name, value in (defaults | self.table["by_objective"].get(self.objective, {})).items():
            self.default(name, value)
        has_none = not self.keeps_dropout and self.objective in self.table["without_dropout"]
        if has_none and number(self.values.get("lora_dropout", 0)):
            self.put("lora_dropout", 0, f"{self.kit} disables dropout with {self.objective}")

    def default(self, name: str, value: Any) -> None:
        """Set one thing that the kit does where its file says nothing."""
        if name not in self.values:
            self.put(name, value, f"default of {self.kit}")


def is_nothing(value: Any) -> bool:
    """Whether a value asks for nothing: null, or empty."""
    return value in (None, [], {}) or (isinstance(value, str) and value.strip().lower() in NOTHING)


def is_true(value: Any) -> bool:
    """Whether a switch is on, as YAML or a command line has it."""
    return str(value).strip().lower() in ("true", "yes", "on", "1")


def is_false(value: Any) -> bool:
    """Whether a switch is off."""
    return str(value).strip().lower() in OFF


def as_list(value: Any) -> list[Any]:
    """A list as it is, a string split at commas, and one value as a list of it."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def number(value: Any) -> float:
    """A number in YAML, where 2e-5 is a string. Raises ``ValueError`` for any other value, and for a switch."""
    if isinstance(value, bool):
        raise ValueError(f"{value}, not a number")
    try:
        return float(value)
    except TypeError:
        raise ValueError(value) from None


def shown(value: Any) -> str:
    """A value, shortened for a message."""
    text = str(value).replace("\n", " ")
    return text if len(text) <= 60 else f"{text[:57]}..."
