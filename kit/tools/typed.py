"""Settings as they are typed on a command line."""

import json
from collections.abc import Mapping
from typing import Any

from kit.system.errors import UserError


def typed(name: str, value: Any) -> str:
    """Return the value of the setting ``name`` as its flag takes it.

    Raises:
        UserError: an item of a list has a comma.
    """
    if value is None:
        return "none"
    if isinstance(value, list | tuple) and not any(isinstance(each, Mapping) for each in value):
        if any("," in str(each) for each in value):
            fix = "put it into a recipe file, where lists are lists"
            raise UserError(name, f"a comma in an item of {value!r}", fix=fix)
        return ",".join(map(str, value))
    return json.dumps(value) if isinstance(value, bool | Mapping | list | tuple) else str(value)
