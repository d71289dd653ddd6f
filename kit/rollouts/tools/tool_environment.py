"""An environment of tools: the policy calls functions of the user, and reads their results, in several turns.

Promises:

- The user's code runs in processes of its own. What a tool raises, or that it hangs, is a message to the model, not the
  end of the run.
- Sampled ids stay as they are. Results are appended to them as ids, and are not learned.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kit.data.feed.data import Data
from kit.data.samples.samples import Samples
from kit.rollouts.environment import Environment, append_turn
from kit.rollouts.generation import Completion, text_of
from kit.rollouts.tools.tool_calls import MalformedCall, ToolCall, call_reader
from kit.rollouts.tools.tool_processes import ToolFailure, ToolHost, ToolSession
from kit.rollouts.tools.tool_turns import Result, ToolTurns
from kit.rollouts.trajectories import Outcome, Segment, Trajectory
from kit.scoring.rewards import Attempt
from kit.system.console import Progress

if TYPE_CHECKING:
    from kit.config.recipe import Recipe

NUM_THREADS = 32  # that wait for tools and rewards
TURNS, CALLS, FAILURES = "completions/turns", "tools/calls", "tools/failures"


class _Played:
    """What belongs to a trajectory that is not finished."""

    def __init__(self, session: ToolSession) -> None:
        self.session = session
        self.messages: list[dict[str, Any]] = []  # after the prompt


class ToolEnvironment(Environment):
    """Tools, and for each trajectory an object of the user's environment class, if there is one.

    A turn without a call ends the trajectory. The calls of a turn are made one after the other, also those of the last
    turn that ``max_turns`` allows, because an environment may count them. In place of results the model reads an error
    message if a call is malformed, or if it wrote several where the chat template writes one.

    Attributes:
        end: the id of the token that ends a turn with a call.
    """

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
        self._data = data
        self._reader = call_reader(tokenizer, data.chat_template)
        self._turns = ToolTurns(data.chat_template, tokenizer, data.encoder.tools)
        self._turns.check()
        self.end = self._turns.end
        self._host = open_host(recipe, is_stopping, data.encoder.tools)
        self._threads = ThreadPoolExecutor(NUM_THREADS)
        self._played: dict[tuple[int, int, int], _Played] = {}
        self._called: list[tuple[Trajectory, Future[list[Result]]]] = []

    def start(self, key: tuple[int, int, int]) -> Trajectory:
        """See ``Environment``."""
        trajectory = super().start(key)
        trajectory.counts = {TURNS: 0, CALLS: 0, FAILURES: 0}
        return trajectory

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
                        trajectory.segments = [Segment(self._turns.prompt(messages), 0.0)]
                    if not self._has_room(len(trajectory.ids)):
                        raise ToolFailure("prompt and observation leave less than max_new_tokens of max_length")
                except ToolFailure as error:
                    trajectory.outcome = "failed"
                    trajectory.rewards = [f"reset: {error} (row {self.prompts.origin(i)})"] * len(self.keys)
                    self._played.pop(trajectory.key).session.close()

    def step(self, trajectory: Trajectory, completion: Completion) -> None:
        """See ``Environment``: start the calls of a turn; without any, its rewards."""
        played, before = self._of(trajectory), self.tokenizer.decode(trajectory.segments[-1].ids)
        append_turn(trajectory, completion)
        trajectory.counts[TURNS] += 1
        text = text_of(self.tokenizer, completion.ids, completion.ended)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        played.messages.append(message)
        calls: list[ToolCall] = []
        error = ""
        if completion.ended:
            try:
                calls = self._reader.read(before, text)
            except MalformedCall as why:
                error = f"malformed call: {why}"
        if calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls
            ]
        if len(calls) > 1 and not self._turns.takes_several:
            calls, error = calls[:1], "several calls in a turn: write one"
        if calls or error:
            trajectory.outcome = ""
            self._called.append((trajectory, self._threads.submit(self._results, trajectory, calls, error)))
        else:
            self._finish(trajectory, trajectory.outcome)

    def collect(self, most: int, progress: Progress) -> None:
        """See ``Environment``."""
        for number in progress(range(most + 1), "tools", most):
            for trajectory, future in self._called[number : number + 1]:
                results = future.result()
                of_tools = [{"role": "tool", "name": each.name, "content": each.content} for each in results]
                self._of(trajectory).messages += of_tools
                ids = self._turns.append(trajectory.segments[-1].ids, results)
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
        self._threads.shutdown(cancel_futures=True)
        self._host.close()

    def _has_room(self, length: int) -> bool:
        """Whether a turn may follow. It may have ``max_new_tokens``: a row of a batch cannot end before the others."""
        return length + self.recipe.max_new_tokens <= self.recipe.max_length

    def _of(self, trajectory: Trajectory) -> _Played:
        key = trajectory.key
        if key not in self._played:
            seed = (self.recipe.seed, *key)
            self._played[key] = _Played(self._host.open(seed, self.rows.get(key[1])))
        return self._played[key]

    def _results(self, trajectory: Trajectory, calls: Sequence[ToolCall], error: str) -> list[Result]:
        """The results of a turn's calls, or ``error`` in their place. Runs in a thread, one for a trajectory."""
        played, found = self._of(trajectory), []
        for call in calls or [ToolCall("unknown", {})]:
            try:
                if error:
                    raise ToolFailure(error)
                content = played.session.call(*call)
            except ToolFailure as failure:
                trajectory.counts[FAILURES] += 1
                content = f"error: {failure}"
            found.append(Result(call.name, content, f"call{trajectory.counts[CALLS]:05}"))
            trajectory.counts[CALLS] += 1
        return found

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


def open_host(
    recipe: "Recipe", is_stopping: Callable[[], bool] = lambda: False, schemas: Sequence[dict[str, Any]] = ()
) -> ToolHost:
    """Return the processes of the user's tools and rewards. ``schemas``: those of the tools, if they are known."""
    return ToolHost(
        tools=recipe.tools,
        environment=recipe.environment,
        rewards=recipe.rewards,
        timeout=recipe.tool_timeout,
        is_stopping=is_stopping,
        schemas=schemas,
    )


def open_environment(
    recipe: "Recipe", data: Data, prompts: Samples, tokenizer: Any, is_stopping: Callable[[], bool]
) -> Environment:
    """Return the environment of a recipe."""
    if recipe.has_tools:
        return ToolEnvironment(recipe, data, prompts, tokenizer, is_stopping)
    return Environment(recipe, prompts, tokenizer, is_stopping)
