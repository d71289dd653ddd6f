"""The dataset types by the names that objectives use: each is the ``KIND`` of the module of this name."""

from importlib import import_module

from kit.config.settings.objective import DECLARED, ObjectiveSettings
from kit.data.kinds.kind import RowKind

KINDS: dict[str, type[RowKind]] = {
    name: import_module(f"kit.data.kinds.{name}").KIND
    for name in dict.fromkeys(spec.rows for spec in DECLARED.values())
}


def kind_of(settings: ObjectiveSettings) -> RowKind:
    """Return the dataset type that the objective needs, with its ``settings``."""
    return KINDS[settings.declared.rows].of(settings)
