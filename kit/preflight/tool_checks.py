"""Checks of tools and environments before the model is loaded."""

from contextlib import closing
from typing import TYPE_CHECKING, Any

from kit.data.feed.data import Data
from kit.data.samples.samples import Samples
from kit.rollouts.generation import ANY_ANSWER, reference_of
from kit.rollouts.tools.tool_calls import call_reader
from kit.rollouts.tools.tool_processes import ToolFailure, ToolHost
from kit.rollouts.tools.tool_turns import proven_turns
from kit.scoring.rewards import Attempt
from kit.system.errors import Problem, UserError, raise_if

if TYPE_CHECKING:
    from kit.config.recipe import Recipe


def tool_schemas(recipe: "Recipe") -> list[dict[str, Any]]:
    """Return the JSON schemas of the tools; none if there are none.

    Raises:
        UserError: there is no such function or class, or it lacks type hints or a docstring.
    """
    if not recipe.has_tools:
        return []
    with closing(ToolHost(recipe)) as host:
        return host.schemas()


def try_environment(recipe: "Recipe", train: Samples, tokenizer: Any) -> list[str]:
    """Begin with the first row, and let the model write the expected answer alone, or ``ANY_ANSWER``.

    Returns:
        A line if it has a reward that is not asked for.

    Raises:
        UserError: ``reset`` or a reward fails.
    """
    if not recipe.environment:
        return []
    row, expected = train.data_rows([0]).get(0), reference_of(tokenizer, train, 0)
    text = ANY_ANSWER if expected is None else expected
    written = [{"role": "assistant", "content": text}]
    attempt = Attempt(expected, text, row, train.origin(0), 1, recipe.max_new_tokens, written)
    problems = []
    with closing(ToolHost(recipe)) as host, closing(host.open((recipe.seed,), row)) as session:
        try:
            session.start()
        except ToolFailure as failure:
            fix = "correct the class: it is made without arguments, and reset is given the row's columns by name"
            raise UserError("--environment", f"reset failed on {attempt.origin}: {failure}", fix=fix) from None
        for name in recipe.rewards:
            found = session.reward(name, recipe.reward_timeout, attempt)
            if isinstance(found, str):
                problems.append(
                    Problem("--rewards", f"failed after reset and the answer {text[:60]!r}: {found}", fix="correct it")
                )
        own = session.reward("environment", recipe.reward_timeout, attempt)
    raise_if(problems)
    if "environment" in recipe.rewards or isinstance(own, str):
        return []
    return ["warning: get_reward of --environment is not used: --rewards environment, or more after a comma, does"]


def check_tools(data: Data, tokenizer: Any, max_new_tokens: int) -> tuple[dict[str, int], list[str]]:
    """Prove that the chat template writes calls that can be read, and appends results to turns as they were sampled.

    Returns:
        The token that ends a turn with a call, with its id; and lines for the user.

    Raises:
        UserError: it does not.
    """
    call_reader(tokenizer, data.chat_template)
    turns = proven_turns(data.chat_template, tokenizer, data.encoder.tools)
    notes = [] if turns.takes_several else ["tools: the chat template writes one call in a turn; several are refused"]
    if turns.rewrites:
        notes.append(f"tools: turns stay as sampled, though the chat template rewrites them: {turns.rewrites}")
    room = data.settings.max_length - 2 * max_new_tokens
    if num := int((data.train.answer_spans[:, 0] > room).sum()):
        found = f"in {num} of {len(data.train)} samples the prompt and two turns of max_new_tokens exceed max_length"
        notes.append(f"tools: {found}, where trajectories end")
    return {tokenizer.convert_ids_to_tokens(turns.end): turns.end}, notes
