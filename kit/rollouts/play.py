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
        media: returns those of a sample, see ``Table.media_with_origin``.
    """
    found = list(trajectories)
    unfinished = [place for place, each in enumerate(found) if not each.outcome]
    size = environment.most_played * ranks.count
    for first in range(0, len(unfinished), size):
        places = unfinished[first : first + size]  # of those that are played at the same time
        mine, most = places[ranks.index :: ranks.count], -(-len(places) // ranks.count)
        if environment.resets:
            environment.reset([found[place] for place in mine], most, progress)
        for turn in range(environment.max_turns):
            if turn or environment.resets:
                _share(found, mine)
            going = [(k % ranks.count, found[place]) for k, place in enumerate(places) if not found[place].outcome]
            if not going:
                break
            requests = [
                Request(each.ids, (*each.key, turn) if turn else each.key, max_new_tokens, media(each.sample), owner)
                for owner, each in going
            ]
            for i, completion in sampler.sample(requests):
                environment.step(going[i][1], completion)
            environment.collect(most, progress)
        environment.score(most, progress)
        _share(found, mine)
    return found


def _share(found: list[Trajectory], mine: Sequence[int]) -> None:
    """Replace the trajectories of other ranks by those that they have; at ``mine`` are this rank's own."""
    for place, trajectory in gather_object([(place, found[place]) for place in mine]):
        if place not in mine:  # the environment fills in its own
            found[place] = trajectory
