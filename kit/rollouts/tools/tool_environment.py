"""An environment of tools: the policy calls functions of the user, and reads their results, in several turns.

Promises:

- The user's code runs in processes of its own. What a tool raises, or that it hangs, is a message to the model, not the
  end of the run.
- Sampled ids stay as they are. Results are appended to them as ids, and are not learned.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kit.data.chat.template import Jinja
from kit.data.feed.data import Data
from kit.data.samples.samples import Samples
from kit.rollouts.environment import Environment, append_turn
from kit.rollouts.generation import Completion, text_of
from kit.rollouts.tools.tool_calls import MalformedCall, ToolCall, call_reader, result_of, turn_of
from kit.rollouts.tools.tool_processes import ToolFailure, ToolHost, ToolSession
from kit.rollouts.tools.tool_turns import proven_turns
from kit.rollouts.trajectories import Outcome, Segment, Trajectory
from kit.scoring.rewards import Attempt
from kit.system.console import Progress
from kit.system.errors import listed

if TYPE_CHECKING:
    from kit.config.recipe import Recipe

NUM_THREADS = 32  # that wait for tools and rewards
TURNS, CALLS, FAILURES = "completions/turns", "tools/calls", "tools/failures"


class Played:
    """A conversation that is not finished: the calls of its turns, and their results."""

    def __init__(self, tools: "Tools", session: ToolSession) -> None:
        self._tools, self.session = tools, session
        self.counts = {TURNS: 0, CALLS: 0, FAILURES: 0}
        self.messages: list[dict[str, Any]] = []  # after the prompt

    def read(self, before: str, text: str, ended: bool) -> tuple[list[ToolCall], str]:
        """Append a turn of the model. Returns its calls, and what the model reads in place of results.

        Args:
            before: the end of the text before the turn.
            text: of ``text_of``.
        """
        calls, error = [], ""
        try:
            calls = self._tools.reader.read(before, text) if ended else []
        except MalformedCall as why:
            error = f"malformed call: {why}"
        self.messages.append(turn_of(calls, self._ids(calls), text))
        self.counts[TURNS] += 1
        if len(calls) > 1 and not self._tools.turns.takes_several:
            return calls[:1], "several calls in a turn: write one"
        return calls, error

    def results(self, calls: Sequence[ToolCall], error: str) -> list[dict[str, Any]]:
        """Make the calls. Appends and returns messages: their results, or ``error`` in their place."""
        calls = calls or [ToolCall("unknown", {})]
        found = []
        for call, call_id in zip(calls, self._ids(calls), strict=True):
            try:
                if error:
                    raise ToolFailure(error)
                if call.name not in self._tools.names:
                    raise ToolFailure(f"there is no tool {call.name[:60]!r}, only {listed(self._tools.names, 20)}")
                content = self.session.call(*call)
            except ToolFailure as failure:
                self.counts[FAILURES] += 1
                content = f"error: {failure}"
            found.append(result_of(call, call_id, content))
        self.counts[CALLS] += len(found)
        self.messages += found
        return found

    def _ids(self, calls: Sequence[ToolCall]) -> list[str]:
        return [f"call{self.counts[CALLS] + k:05}" for k in range(len(calls))]


class Tools:
    """The user's tools, as a chat template writes their calls and results."""

    def __init__(
        self,
        recipe: "Recipe",
        template: Jinja,
        tokenizer: Any,
        schemas: Sequence[dict[str, Any]] = (),
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Raises ``UserError`` if the user's files or the template cannot be used. ``schemas``: if they are known."""
        self._host = ToolHost(recipe, is_stopping)
        schemas = schemas or self._host.schemas()
        self.names = [each["function"]["name"] for each in schemas]
        self.reader = call_reader(tokenizer, template)
        self.turns = proven_turns(template, tokenizer, schemas)

    def open(self, seed: Sequence[int], row: Mapping[str, Any] | None) -> Played:
        """Begin a conversation; arguments as of ``ToolHost.open``."""
        return Played(self, self._host.open(seed, row))

    def close(self) -> None:
        """End all processes."""
        self._host.close()


class ToolEnvironment(Environment):
    """Tools, and for each trajectory an object of the user's environment class, if there is one.

    A turn without a call ends the trajectory. The calls of a turn are made one after the other, also those of the last
    turn that ``max_turns`` allows, because an environment may count them. In place of results the model reads an error
    message if a call is malformed, or if it wrote several where the chat template writes one.

    Attributes:
        end: the id of the token that ends a turn with a call.
    """

    most_played = 256  # each has two processes with 4 MB, and a file descriptor of the run, which may have 1,024

    def __init__(
        self,
        recipe: "Recipe",
        data: Data,
        prompts: Samples,
        tokenizer: Any,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            prompts: the samples of ``data`` whose prompts are played.
            is_stopping: see ``Environment``.
        """
        super().__init__(recipe, prompts, tokenizer, is_stopping)
        self.max_turns, self.resets = recipe.max_turns, recipe.environment is not None
        self.most_tokens = min(recipe.max_turns * recipe.max_new_tokens, recipe.max_length)
        if self.resets:
            self.rows = prompts.data_rows(range(len(prompts)))
        self._tools = Tools(recipe, data.chat_template, tokenizer, data.encoder.tools, is_stopping)
        self.end = self._tools.turns.end
        self._threads = ThreadPoolExecutor(NUM_THREADS)
        self._played: dict[tuple[int, int, int], Played] = {}
        self._called: list[tuple[Trajectory, Future[list[dict[str, Any]]]]] = []

    def reset(self, trajectories: Sequence[Trajectory], most: int, progress: Progress) -> None:
        """See ``Environment``. A trajectory whose reset fails has no reward."""
        started = [(each, self._threads.submit(self._of(each).session.start)) for each in trajectories]
        for number in progress(range(most + 1), "environments", most):
            for trajectory, future in started[number : number + 1]:
                i = trajectory.sample
                try:
                    if observation := future.result():
                        *before, last = self.prompts.prompt_messages(i)
                        messages = [*before, {**last, "content": last["content"] + observation}]
                        trajectory.segments = [Segment(self._tools.turns.prompt(messages), 0.0)]
                    if not self._has_room(len(trajectory.ids)):
                        raise ToolFailure("prompt and observation leave less than max_new_tokens of max_length")
                except ToolFailure as error:
                    trajectory.outcome = "failed"
                    why = f"reset: {error} (row {self.prompts.origin(i)})"
                    trajectory.rewards = [why] * max(1, len(self.keys))  # said also where there are no rewards
                    self._played.pop(trajectory.key).session.close()

    def step(self, trajectory: Trajectory, completion: Completion) -> None:
        """See ``Environment``: start the calls of a turn; without any, its rewards."""
        played, before = self._of(trajectory), self.tokenizer.decode(trajectory.segments[-1].ids)
        append_turn(trajectory, completion)
        text = text_of(self.tokenizer, completion.ids, completion.ended)
        calls, error = played.read(before, text, completion.ended)
        if calls or error:
            trajectory.outcome = ""
            self._called.append((trajectory, self._threads.submit(played.results, calls, error)))
        else:
            self._finish(trajectory, trajectory.outcome)

    def collect(self, most: int, progress: Progress) -> None:
        """See ``Environment``."""
        for number in progress(range(most + 1), "tools", most):
            for trajectory, future in self._called[number : number + 1]:
                results = future.result()
                ids = self._tools.turns.append(trajectory.segments[-1].ids, results)
                if ids is None:  # it ended with a token after which no results can follow
                    self._finish(trajectory, "ended")
                elif trajectory.counts[TURNS] == self.max_turns:
                    self._finish(trajectory, "max_turns")
                elif not self._has_room(len(trajectory.ids) + len(ids)):
                    self._finish(trajectory, "max_length")
                else:
                    trajectory.segments.append(Segment(ids, 0.0))
        self._called = []

    def close(self) -> None:
        """See ``Environment``."""
        super().close()
        self._tools.close()  # so that no thread waits for a call
        self._threads.shutdown(cancel_futures=True)

    def _has_room(self, length: int) -> bool:
        """Whether a turn may follow. It may have ``max_new_tokens``: a row of a batch cannot end before the others."""
        return length + self.recipe.max_new_tokens <= self.recipe.max_length

    def _of(self, trajectory: Trajectory) -> Played:
        key = trajectory.key
        if key not in self._played:
            self._played[key] = self._tools.open((self.recipe.seed, *key), self.rows.get(key[1]))
            trajectory.counts = self._played[key].counts
        return self._played[key]

    def _finish(self, trajectory: Trajectory, outcome: Outcome) -> None:
        """Set the outcome, and start to compute the rewards."""
        trajectory.outcome = outcome
        played = self._played.pop(trajectory.key)
        attempt = self.attempt(trajectory)._replace(
            completion=played.messages, num_tokens=trajectory.num_written, max_new_tokens=self.most_tokens
        )
        self.scored.append((trajectory, self._threads.submit(self._rewards, played.session, attempt)))

    def _rewards(self, session: ToolSession, attempt: Attempt) -> list[float | str]:
        try:
            return [session.reward(name, self.recipe.reward_timeout, attempt) for name in self.recipe.rewards]
        finally:
            session.close()


def open_environment(
    recipe: "Recipe", data: Data, prompts: Samples, tokenizer: Any, is_stopping: Callable[[], bool]
) -> Environment:
    """Return the environment of a recipe."""
    if recipe.has_tools:
        return ToolEnvironment(recipe, data, prompts, tokenizer, is_stopping)
    return Environment(recipe, prompts, tokenizer, is_stopping)
