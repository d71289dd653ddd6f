"""Trackers show one run after a resume. For TensorBoard: test_log.py."""

from types import SimpleNamespace

import pytest

from kit.config.recipe import Recipe
from kit.run.trackers import start_trackers
from kit.system.errors import UserError


@pytest.fixture
def start(tmp_path):
    """Starts trackers that only note what they get; returns them by name."""

    def start(*names, refuse=(), **settings):
        def init_trackers(project, init_kwargs):
            (name,) = init_kwargs
            if name in refuse:
                raise ConnectionError("no route to it")
            made = SimpleNamespace(name=name, project=project, options=init_kwargs[name], rows=[], settings=[])
            made.log = lambda row, step: made.rows.append((step, row))
            made.store_init_configuration = made.settings.append
            accelerator.trackers = [made]

        accelerator = SimpleNamespace(log_with=list(names), trackers=[], init_trackers=init_trackers)
        recipe = Recipe(model_name_or_path="m", dataset="d", report_to=list(names), **settings)
        start_trackers(accelerator, recipe, recipe.model_dump(), "ab12", 4, tmp_path, [])
        return accelerator, {tracker.name: tracker for tracker in accelerator.trackers}

    return start


def test_each_tracker_knows_the_run_by_the_same_identifier_at_every_start(start):
    first, again = (start("wandb", "trackio", run_name="mine", project="ours")[1] for _ in range(2))
    assert {name: each.options for name, each in first.items()} == {name: each.options for name, each in again.items()}
    assert {each.project for each in first.values()} == {"ours"}
    assert first["wandb"].options == {"id": "ab12", "resume": "allow", "name": "mine"}
    assert first["trackio"].options == {"name": "mine-ab12", "resume": "allow"}


def test_a_tracker_that_does_not_start_is_named_with_the_flag_that_leaves_it_out(start):
    with pytest.raises(UserError, match=r"trackio does not start \(no route to it\)\n    -> --report_to wandb, which"):
        start("wandb", "trackio", refuse=["trackio"])
