"""The kinds of rows by their names, as objectives ask for them: each is the ``KIND`` of the module of this name."""

from importlib import import_module

from kit.config.settings.objective import DECLARED, ObjectiveSettings
from kit.data.kinds.kind import RowKind

KINDS: dict[str, type[RowKind]] = {
    name: import_module(f"kit.data.kinds.{name}").KIND
    for name in dict.fromkeys(spec.rows for spec in DECLARED.values())
}


def kind_of(settings: ObjectiveSettings) -> RowKind:
    """Return the kind of rows that the objective asks for, with what ``settings`` say of it."""
    return KINDS[settings.declared.rows].of(settings)
