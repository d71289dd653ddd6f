"""Play trajectories: the policy and the environment in turn, until each has an outcome and its rewards.

Promises:

- Every rank plays the same trajectories from start to end, so an environment stays in one process.
- A turn is sampled by (key, turn), independent of what else is sampled at the time.
"""

from collections.abc import Callable, Sequence
from typing import Any

from accelerate.utils import gather_object

from kit.data.feed.data_ranks import Ranks
from kit.rollouts.environment import Environment
from kit.rollouts.generation import Request
from kit.rollouts.sampler import Sampler
from kit.rollouts.trajectories import Trajectory
from kit.system.console import Progress


def play(
    environment: Environment,
    sampler: Sampler,
    trajectories: Sequence[Trajectory],
    max_new_tokens: int,
    media: Callable[[int], Sequence[Any]],
    ranks: Ranks,
    progress: Progress,
) -> list[Trajectory]:
    """Return the trajectories with all their turns and rewards. Called by all ranks.

    While some are sampled, the environment works on those that were sampled before them.

    Args:
        trajectories: the same on all ranks; those with an outcome stay as they are.
        max_new_tokens: of a turn.
        images: returns those of a sample, see ``Table.media_with_origin``.
    """
    found = list(trajectories)
    places = [place for place, each in enumerate(found) if not each.outcome]
    size = environment.most_played * ranks.count
    for first in range(0, len(places), size):
        some = places[first : first + size]
        played = _play([found[place] for place in some], environment, sampler, max_new_tokens, media, ranks, progress)
        for place, each in zip(some, played, strict=True):
            found[place] = each
    return found


def _play(
    found: list[Trajectory],
    environment: Environment,
    sampler: Sampler,
    max_new_tokens: int,
    media: Callable[[int], Sequence[Any]],
    ranks: Ranks,
    progress: Progress,
) -> list[Trajectory]:
    """Play trajectories at the same time."""
    mine = range(ranks.index, len(found), ranks.count)
    most = -(-len(found) // ranks.count)

    def share() -> None:
        for place, trajectory in gather_object([(place, found[place]) for place in mine]):
            if place not in mine:  # the environment fills in its own
                found[place] = trajectory

    if environment.resets:
        environment.reset([found[place] for place in mine], most, progress)
    for turn in range(environment.max_turns):
        if turn or environment.resets:
            share()
        going = [place for place, each in enumerate(found) if not each.outcome]
        if not going:
            break
        requests = [
            Request(
                each.ids,
                (*each.key, turn) if turn else each.key,
                max_new_tokens,
                media(each.sample),
                place % ranks.count,
            )
            for place in going
            for each in [found[place]]
        ]
        for i, completion in sampler.sample(requests):
            environment.step(found[going[i]], completion)
        environment.collect(most, progress)
    environment.score(most, progress)
    share()
    return found
