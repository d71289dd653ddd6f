"""Checks of tools and environments before the model is loaded."""

from contextlib import closing
from typing import TYPE_CHECKING, Any

from kit.data.feed.data import Data
from kit.rollouts.tools.tool_calls import call_reader
from kit.rollouts.tools.tool_environment import open_host
from kit.rollouts.tools.tool_turns import ToolTurns

if TYPE_CHECKING:
    from kit.config.recipe import Recipe


def tool_schemas(recipe: "Recipe") -> list[dict[str, Any]]:
    """Return the JSON schemas of the tools; none if there are none.

    Raises:
        UserError: there is no such function or class, or it lacks type hints or a docstring.
    """
    if not recipe.has_tools:
        return []
    with closing(open_host(recipe)) as host:
        return host.schemas()


def check_tools(data: Data, tokenizer: Any) -> tuple[dict[str, int], list[str]]:
    """Prove that the chat template writes calls that can be read, and appends results to turns as they were sampled.

    Returns:
        The token that ends a turn with a call, with its id; and lines for the user.

    Raises:
        UserError: it does not.
    """
    call_reader(tokenizer, data.chat_template)
    turns = ToolTurns(data.chat_template, tokenizer, data.encoder.tools)
    turns.check()
    notes = [] if turns.takes_several else ["tools: the chat template writes one call in a turn; several are refused"]
    return {tokenizer.convert_ids_to_tokens(turns.end): turns.end}, notes
