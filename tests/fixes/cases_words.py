"""Fixes of commands, of the plan, of models' names and of words that other kits have."""

from fixes.harness import case

UNTYPED: dict[str, str] = {}


@case("kit/cli/main.py:main")
def a_command_with_a_slip(world):
    return "kit recpies"
