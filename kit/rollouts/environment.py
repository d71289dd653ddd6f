"""Environments: the prompts, what follows a turn of the policy, and the rewards."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from kit.data.samples.samples import Samples
from kit.rollouts.generation import Completion, reference_of, text_of
from kit.rollouts.trajectories import Segment, Trajectory
from kit.scoring.own_metric import MetricError, is_own, key_of
from kit.scoring.rewards import Attempt, Scorer
from kit.strategy.processes.launcher import cores_of_rank
from kit.system.console import Progress, say
from kit.system.errors import Problem

if TYPE_CHECKING:
    from kit.config.recipe import Recipe


class Environment:
    """The prompts, and what follows a turn of the policy: here nothing, as a completion is a single turn.

    On each rank it has the trajectories that the rank plays (``kit.rollouts.play``). While some are sampled, it works
    on what follows the turns of others, and on rewards.

    Attributes:
        keys: the name of each reward in metrics.
        max_turns: of a trajectory.
        most_tokens: that the policy may write in a trajectory.
        resets: whether trajectories begin with ``reset``.
        most_played: trajectories of a rank at the same time.
        end: the id of a token that also ends turns.
    """

    max_turns = 1
    resets = False
    most_played = sys.maxsize
    end: int | None = None

    def __init__(self, recipe: "Recipe", prompts: Samples, tokenizer: Any, is_stopping: Callable[[], bool]) -> None:
        """
        Args:
            is_stopping: whether this process was asked to stop, and so does not wait for rewards.
        """
        self.recipe, self.prompts, self.tokenizer = recipe, prompts, tokenizer
        self.most_tokens = recipe.max_new_tokens
        self._weights = recipe.reward_weights or [1.0] * len(recipe.rewards)
        keys = [key_of(name) for name in recipe.rewards]
        self.keys = [f"{key}_{keys[: k + 1].count(key)}" if keys.count(key) > 1 else key for k, key in enumerate(keys)]
        is_read = any(map(is_own, recipe.rewards))
        self.rows: Any = prompts.data_rows(range(len(prompts))) if is_read else {}
        self._scorer = Scorer(recipe.rewards, recipe.reward_timeout, cores_of_rank(), is_stopping)
        self.scored: list[tuple[Trajectory, Future[list[float | str]]]] = []
        self._failures: Counter[str] = Counter()  # by reward, or ``reset``

    def start(self, key: tuple[int, int, int]) -> Trajectory:
        """Return a trajectory that begins with the prompt."""
        return Trajectory(key, [Segment(self.prompts.prompt(key[1]).ids, 0.0)])

    def reset(self, trajectories: Sequence[Trajectory], most: int, progress: Progress) -> None:
        """Add to the prompts what the environment shows first; ``most`` and ``progress`` as in ``score``."""

    def step(self, trajectory: Trajectory, completion: Completion) -> None:
        """Append a turn of the policy, and start to work on what follows it."""
        append_turn(trajectory, completion)
        self.scored.append((trajectory, self._scorer.submit(self.attempt(trajectory))))

    def collect(self, most: int, progress: Progress) -> None:
        """Append what follows the turns since the last call, or set the outcome; arguments as in ``score``."""

    def score(self, most: int, progress: Progress) -> None:
        """Wait for the rewards of this rank's trajectories.

        Args:
            most: trajectories of any rank.
            progress: ends it after a stop, and then rewards may be missing, also of the last one.
        """
        for number in progress(range(most + 1), "rewards", most):
            for trajectory, rewards in self.scored[number : number + 1]:
                trajectory.rewards = rewards.result()
                pairs = zip(self._weights, trajectory.rewards, strict=False)
                trajectory.reward = sum(w * each if isinstance(each, float) else np.nan for w, each in pairs)
        self.scored = []

    def attempt(self, trajectory: Trajectory) -> Attempt:
        """Return what the rewards of a trajectory need."""
        i, answer = trajectory.sample, trajectory.segments[-1].ids
        return Attempt(
            expected=reference_of(self.tokenizer, self.prompts, i),
            answer=text_of(self.tokenizer, answer, trajectory.ended),
            row=self.rows.get(i),
            origin=self.prompts.origin(i),
            num_tokens=len(answer),
            max_new_tokens=self.recipe.max_new_tokens,
        )

    def say_failures(self, trajectories: Sequence[Trajectory]) -> None:
        """Say why rewards failed, once for each. Raises ``MetricError`` if no trajectory of a rollout has a reward."""
        failed = [
            ("reset" if trajectory.outcome == "failed" else f"reward {key}", why)
            for trajectory in trajectories
            for key, why in zip(self.keys or ["environment"], trajectory.rewards, strict=False)
            if isinstance(why, str)
        ]
        new = {key: why for key, why in reversed(failed) if key not in self._failures}
        self._failures.update(key for key, _ in failed)
        if failed and not any(np.isfinite(trajectory.reward) for trajectory in trajectories):
            raise MetricError(Problem("--rewards", f"no completion of this rollout has a reward: {failed[0][1]}"))
        say(*(f"warning: {key} failed, its completion is dropped: {why}" for key, why in new.items()))

    def closing_notes(self) -> list[str]:
        """A line for each reward that failed."""
        return [f"warning: {name} failed {count} times" for name, count in self._failures.items()]

    def close(self) -> None:
        """Work on nothing more, after a rollout that ends early."""
        self._scorer.close()


def append_turn(trajectory: Trajectory, completion: Completion) -> None:
    """Append a turn of the policy, and set the outcome as if it were the last one."""
    ids, ended, logps = completion
    trajectory.segments.append(Segment(ids, 1.0))
    trajectory.outcome = "ended" if ended else "max_new_tokens"
    if logps:
        trajectory.logps.setdefault("engine_logps", []).extend(logps)
