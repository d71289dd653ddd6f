"""The meaning of other kits' keys: tables in ``kits/``, one per kit and one that they share.

Plain Python and PyYAML. Promise: a table is read only where a key is found that is no setting of this kit. The hint for
a mistyped key and ``kit convert`` read the same tables; ``kits/common.yaml`` says what each section means.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

KITS = {"axolotl": "axolotl", "LLaMA-Factory": "llama_factory", "TRL": "trl", "ms-swift": "ms_swift"}
GGUF = "GGUF files are for inference; use the model that it was made from"
NOTHING = ("", "none", "null", "~", "[]", "{}")
OFF = ("false", "no", "off")
_REASONS = ("needless", "speed", "training", "refused")
_FOLDER = Path(__file__).with_name("kits")


@dataclass(frozen=True)
class Meaning:
    """The meaning of another kit's key with its value.

    Attributes:
        kind: ``settings`` of ours, ``nothing`` (null, empty or off), or why it has none: the name of a section.
        text: the reason, or the setting's name if it only has another one here.
    """

    kind: str
    text: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@cache
def table_of(stem: str) -> dict[str, Any]:
    """Return the table in ``kits/STEM.yaml``; of its sections with words, each word with the answer to it."""
    table = yaml.load((_FOLDER / f"{stem}.yaml").read_text(encoding="utf-8"), yaml.SafeLoader)
    for section in ("same", *_REASONS):
        table[section] = {word: text for text, words in table.get(section, {}).items() for word in words.split()}
    return table


def meaning(name: str, value: Any, kit: str = "") -> Meaning | None:
    """Return what a key of another kit is here; None if it is not known.

    Args:
        value: as the file or the command line has it.
        kit: whose key it is, a name in ``KITS``; empty: of any.
    """
    stems = [KITS[kit], "common"] if kit else ["common", *KITS.values()]
    return next((found for stem in stems if (found := _meaning(table_of(stem), name, value))), None)


def _meaning(table: Mapping[str, Any], name: str, value: Any) -> Meaning | None:
    is_one = isinstance(value, list) and len(value) == 1
    text = str(value[0] if is_one else value).strip().lower()
    choices = {str(choice).lower(): chosen for choice, chosen in table.get("choices", {}).get(name, {}).items()}
    text = "true" if text in ("1", "yes", "on") and "true" in choices else text
    sections = [(section, answer) for section in ("same", *_REASONS) if (answer := _answer(table[section], name))]
    if not choices and not sections:
        return None
    if text in NOTHING:
        return Meaning("nothing")
    if chosen := choices.get(text, choices.get("*" if text not in OFF else text)):
        for kind in _REASONS:
            if kind in chosen:
                return Meaning(kind, chosen[kind])
        return Meaning("settings", settings=chosen)
    if text in choices or (text in OFF and not (sections and sections[0][0] == "same")):
        return Meaning("nothing")
    if not sections:
        return None
    kind, answer = sections[0]
    if kind == "same":
        return Meaning("settings", answer, {answer: value})
    return Meaning("nothing" if kind in ("speed", "training") and text.strip("0.") == "" else kind, answer)


def _answer(words: Mapping[str, str], name: str) -> str:
    if name in words:
        return words[name]
    starts = [word for word in words if word.endswith("*") and fnmatchcase(name, word)]
    return words[max(starts, key=len)] if starts else ""


def hint_for_other_key(name: str, value: Any = True) -> str:
    """Return what to use instead of the key ``name`` of another kit; empty if no kit known here has it."""
    found = meaning(name, value)
    if found is None:
        return ""
    if found.kind == "nothing":
        return "leave it out: this value has no effect"
    if found.kind == "settings":
        return f"use {found.text or ', with '.join(f'{ours}: {_shown(to)}' for ours, to in found.settings.items())}"
    return f"leave it out: {found.text}" if found.kind == "needless" else found.text


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def hint_for_other_value(setting: str, value: str) -> str:
    """Return why a value of ``setting`` that other programs take is not supported; empty if none is known."""
    words = {
        word: reason
        for reason, words in table_of("common")["values"].get(setting, {}).items()
        for word in words.split()
    }
    return _answer(words, value.strip().lower())


def kit_of(values: Mapping[str, Any], ours: Collection[str], least: int = 1) -> str:
    """Return the kit whose file has these keys; empty if no known kit has them.

    Args:
        values: of the file, not flattened.
        ours: names of this kit's settings, which say nothing.
        least: how many keys of that kit there must be: a recipe of ours may have a few by mistake.
    """
    given = set(values) - set(ours)
    if len(given) < least:
        return ""
    kits = KITS.keys() - ({"TRL"} if "dataset" in values else {})  # TRL's is dataset_name
    hits = {kit: len(given & set(table_of(KITS[kit])["recognised_by"].split())) for kit in sorted(kits)}
    best = max(hits, key=lambda kit: hits[kit])
    return best if hits[best] >= least else ""
