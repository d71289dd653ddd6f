"""Environments: the prompts, and the rewards of completions."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from kit.data.samples.samples import Samples
from kit.rollouts.generation import Completion, text_of
from kit.rollouts.trajectories import Segment, Trajectory
from kit.scoring.own_metric import MetricError, is_own, key_of
from kit.scoring.rewards import Attempt, Scorer
from kit.strategy.processes.launcher import cores_of_rank
from kit.system.console import Progress, say
from kit.system.errors import Problem

if TYPE_CHECKING:
    from kit.config.recipe import Recipe


class SingleTurn:
    """A single turn: one completion to a prompt of the data, whose rewards are computed while others are generated.

    Attributes:
        keys: the name of each reward in metrics.
    """

    def __init__(self, recipe: "Recipe", prompts: Samples, tokenizer: Any, is_stopping: Callable[[], bool]) -> None:
        """
        Args:
            is_stopping: whether this process was asked to stop, and so does not wait for rewards.
        """
        self._recipe, self._prompts, self._tokenizer = recipe, prompts, tokenizer
        self._weights = recipe.reward_weights or [1.0] * len(recipe.rewards)
        keys = [key_of(name) for name in recipe.rewards]
        self.keys = [f"{key}_{keys[: k + 1].count(key)}" if keys.count(key) > 1 else key for k, key in enumerate(keys)]
        is_read = any(map(is_own, recipe.rewards))
        self._rows: Any = prompts.data_rows(range(len(prompts))) if is_read else {}
        self._scorer = Scorer(recipe.rewards, recipe.reward_timeout, cores_of_rank(), is_stopping)
        self._submitted: list[tuple[Trajectory, Future[list[float | str]]]] = []
        self._failures: Counter[str] = Counter()  # by reward

    def start(self, key: tuple[int, int, int]) -> Trajectory:
        """Return a trajectory that begins with the prompt."""
        return Trajectory(key, [Segment(self._prompts.prompt(key[1]).ids, 0.0)])

    def step(self, trajectory: Trajectory, completion: Completion) -> None:
        """Append a completion, and start to compute its rewards."""
        ids, trajectory.ended, logps = completion
        trajectory.segments.append(Segment(ids, 1.0))
        if logps:
            trajectory.logps["engine_logps"] = list(logps)
        i = trajectory.sample
        expected = text_of(self._tokenizer, self._prompts.prompt(i).reference)
        answer = text_of(self._tokenizer, ids, trajectory.ended)
        row, origin = self._rows.get(i), self._prompts.origin(i)
        attempt = Attempt(expected, answer, row, origin, len(ids), self._recipe.max_new_tokens)
        self._submitted.append((trajectory, self._scorer.submit(attempt)))

    def collect(self, most: int, progress: Progress) -> None:
        """Wait for the rewards of this rank's trajectories.

        Args:
            most: trajectories of any rank.
            progress: ends it after a stop, and then rewards may be missing, also of the last one.
        """
        for number in progress(range(most + 1), "rewards", most):
            for trajectory, rewards in self._submitted[number : number + 1]:
                trajectory.rewards = rewards.result()
                pairs = zip(self._weights, trajectory.rewards, strict=False)
                trajectory.reward = sum(w * each if isinstance(each, float) else np.nan for w, each in pairs)
        self._submitted = []

    def say_failures(self, trajectories: Sequence[Trajectory]) -> None:
        """Say why rewards failed, once for each. Raises ``MetricError`` if no trajectory of a rollout has a reward."""
        failed = [
            (key, why)
            for trajectory in trajectories
            for key, why in zip(self.keys, trajectory.rewards, strict=True)
            if isinstance(why, str)
        ]
        new = {key: why for key, why in reversed(failed) if key not in self._failures}
        self._failures.update(key for key, _ in failed)
        if failed and not any(np.isfinite(trajectory.reward) for trajectory in trajectories):
            raise MetricError(Problem("--rewards", f"no completion of this rollout has a reward: {failed[0][1]}"))
        say(*(f"warning: reward {key} failed, its completion is dropped: {why}" for key, why in new.items()))

    def closing_notes(self) -> list[str]:
        """A line for each reward that failed."""
        return [f"warning: reward {name} failed {count} times" for name, count in self._failures.items()]

    def close(self) -> None:
        """Compute no more rewards, after a rollout that ends early."""
        self._scorer.close()
