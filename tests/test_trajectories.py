"""The loss mask of a trajectory of several turns, and that a checkpoint holds all of it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from kit.data.feed.batches import Collator
from kit.data.feed.data_ranks import Ranks
from kit.rollouts.trajectories import Segment, Trajectories, Trajectory

READ, WROTE = 0.0, 1.0
SEGMENTS = [Segment([5, 6, 7], READ), Segment([8, 9], WROTE), Segment([10], READ), Segment([11, 12], WROTE)]
LOGPS = [-1.0, -2.0, -3.0, -4.0]


@pytest.mark.parametrize("packing", [False, True])
def test_all_actions_of_a_trajectory_are_learned_and_nothing_that_it_read(packing):
    turns = Trajectory((0, 0, 0), SEGMENTS, "ended", [0.5], 0.5, advantage=2.0, logps={"old_logps": LOGPS})
    cut = Trajectory((0, 0, 1), SEGMENTS[:2], "max_length", [0.0], 0.0, advantage=-2.0, logps={"old_logps": []})
    kept = [Trajectory.from_state(json.loads(json.dumps(each.state()))) for each in (turns, cut)]
    assert kept == [turns, cut]
    prompts = SimpleNamespace(dataset_ids=np.zeros(1, np.int64), media_codec=None)
    samples = Trajectories(kept, prompts, masks_truncated=True)
    (batch,) = samples.micro_batches(Collator(2, 0, packing, 32), Ranks())
    assert batch.targets.tolist() == [8, 9, 11, 12] and batch.per_target["old_logps"].tolist() == LOGPS
    assert sorted(batch.per_sequence["advantages"].tolist()) == [-2.0, 2.0]
    assert (samples.lengths.tolist(), samples.num_targets.tolist()) == ([8, 5], [4, 0])
