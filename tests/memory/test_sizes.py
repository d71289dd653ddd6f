"""A checkpoint has a size, and a run as many of them on the disk as the saver leaves there."""

import pytest
from checkpoint_helpers import saver_of
from torch import nn

from kit.checkpoint.manifest import list_checkpoints
from kit.checkpoint.save import Saver
from kit.config.settings.output import OutputSettings
from kit.memory.sizes import num_checkpoints


@pytest.mark.parametrize(("limit", "keep_best"), [(0, False), (1, False), (2, False), (1, True)])
def test_a_saver_never_has_more_on_the_disk_than_is_counted(limit, keep_best, tmp_path, monkeypatch):
    """The most are there before an older one is deleted. The first checkpoint is the best one."""
    found, prune = [], Saver._prune

    def counted(self, best_step):
        found.append(len(list_checkpoints(tmp_path)))
        prune(self, best_step)

    monkeypatch.setattr(Saver, "_prune", counted)
    settings = {"save_steps": 1, "save_total_limit": limit, "keep_best": keep_best}
    saver, model = saver_of(tmp_path, async_save=False, **settings), nn.Linear(2, 2)
    for step in range(1, 7):
        saver.save(model, None, {"step": step, "best": {"step": 1}}, weights_only=True)
    assert max(found) == num_checkpoints(OutputSettings(**settings), total_steps=6)


def test_a_run_has_no_more_checkpoints_than_it_saves():
    cases = [
        ({}, None, 3),
        ({"save_strategy": "epoch"}, None, 3),
        ({"save_strategy": "no"}, None, 1),
        ({"save_steps": 0}, None, 1),
        ({"save_steps": 0, "keep_best": True}, None, 4),
        ({"save_steps": 100}, 150, 2),
        ({"save_steps": 0.5, "save_total_limit": 0}, 10, 2),
        ({"save_steps": 10, "save_total_limit": 0}, 95, 10),
        ({"save_total_limit": 0}, 95, None),
    ]
    for settings, total_steps, number in cases:
        assert num_checkpoints(OutputSettings(**settings), total_steps) == number, settings
