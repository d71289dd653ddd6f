"""Fixes of commands, of the plan, of models' names and of words that other kits have."""

from fixes.harness import case

UNTYPED: dict[str, str] = {}


@case("kit/cli/main.py:_unknown")
def a_command_with_a_slip(world):
    return "kit recpies"


@case("kit/cli/main.py:_unknown", edit=lambda world, problem, command: problem.fix)
def a_command_of_another_kit(world):
    return "kit finetune"
