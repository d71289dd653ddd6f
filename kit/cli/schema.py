"""``kit schema``: print the JSON schema of recipe files."""

import json

from kit.config.json_schema import recipe_schema
from kit.system.console import Parser, show

HELP = "print the JSON schema of recipes, for completion and checks in editors"


def run(argv: list[str]) -> int:
    """Print the schema."""
    Parser(prog="kit schema", description=HELP).parse_args(argv)
    show(json.dumps(recipe_schema(), indent=1))
    return 0
