"""Trackers show a run as one, and a name that one of them refuses ends no run. What TensorBoard shows: test_log.py."""

from types import SimpleNamespace

import pytest

from kit.config.recipe import Recipe
from kit.errors import UserError
from kit.run.trackers import start_trackers, track


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
            made.tracker = SimpleNamespace(set_name=lambda name: setattr(made, "title", name))
            accelerator.trackers = [made]

        accelerator = SimpleNamespace(log_with=list(names), trackers=[], init_trackers=init_trackers)
        recipe = Recipe(model_name_or_path="m", dataset="d", report_to=list(names), **settings)
        start_trackers(accelerator, recipe, "ab12", 4, tmp_path, [])
        return accelerator, {tracker.name: tracker for tracker in accelerator.trackers}

    return start


def test_each_tracker_knows_the_run_by_the_same_identifier_at_every_start(start):
    names = ("wandb", "swanlab", "comet_ml", "trackio")
    first, again = (start(*names, run_name="mine", project="ours")[1] for _ in range(2))
    assert {name: each.options for name, each in first.items()} == {name: each.options for name, each in again.items()}
    assert {each.project for each in first.values()} == {"ours"}
    assert first["wandb"].options == {"id": "ab12", "resume": "allow", "name": "mine"}
    assert first["swanlab"].options == {"id": "ab12", "resume": "allow", "experiment_name": "mine"}
    assert len(first["comet_ml"].options["experiment_key"]) == 32 and first["comet_ml"].title == "mine"


def test_mlflow_continues_its_own_run_and_gets_names_that_it_takes(start, monkeypatch):
    asked, runs = [], []

    def search_runs(**query):
        asked.append(query)
        return runs

    monkeypatch.setitem(__import__("sys").modules, "mlflow", SimpleNamespace(search_runs=search_runs))
    accelerator, trackers = start("mlflow", "wandb", run_name="mine", project="ours")
    assert trackers["mlflow"].options == {"run_name": "mine", "tags": {"kit_run": "ab12"}}
    assert asked[0]["experiment_names"] == ["ours"] and "tags.kit_run = 'ab12'" in asked[0]["filter_string"]
    track(accelerator, {"step": 5, "loss": 1.0, "loss/a[:9] b.jsonl": 2.0, "samples": ["x"]})
    assert trackers["mlflow"].rows == [(5, {"loss": 1.0, "loss/a_:9_ b.jsonl": 2.0})]
    assert trackers["wandb"].rows == [(5, {"loss": 1.0, "loss/a[:9] b.jsonl": 2.0})]
    runs.append(SimpleNamespace(info=SimpleNamespace(run_id="theirs")))
    _, trackers = start("mlflow")
    assert trackers["mlflow"].options == {"run_id": "theirs"} and not trackers["mlflow"].settings  # which it has


def test_a_tracker_that_does_not_start_is_named_with_the_flag_that_leaves_it_out(start):
    with pytest.raises(UserError, match=r"swanlab does not start \(no route to it\)\n    -> --report_to wandb, which"):
        start("wandb", "swanlab", refuse=["swanlab"])
