"""Every machine must have the same settings, code, and content of paths."""

from kit.run import facts as facts_module
from kit.run.facts import OWN_OF_MACHINE, compared_facts
from kit.run.record import versions
from kit.strategy.processes.agreement import compare_facts
from kit.strategy.strategies import DDP
from kit.strategy.topology import Topology

TOPOLOGY = Topology(strategy=DDP, config_name="ddp", num_processes=2, mixed_precision="no", device_type="cpu")
CONTENT = {"dataset": "abc"}


def facts(recipe, content=CONTENT):
    return compared_facts(recipe.model_dump(mode="json", exclude=OWN_OF_MACHINE), TOPOLOGY, content)


def found(one, other):
    """The fields in which two ranks differ."""
    return [problem.where for problem in compare_facts([one, other], ["a", "b"])]


def test_a_setting_or_a_version_that_differs_is_refused(recipe, monkeypatch):
    own = facts(recipe())
    for changes in ({"learning_rate": 1e-4}, {"per_device_train_batch_size": 4}, {"logging_steps": 5}):
        assert found(own, facts(recipe(**changes))) == [*changes], changes
    monkeypatch.setattr(facts_module, "versions", lambda: versions() | {"torch": "0.0.1"})
    assert found(own, facts(recipe())) == ["torch"]


def test_a_path_may_differ_and_its_content_not(recipe):
    elsewhere = recipe(model_name_or_path="/m", dataset="/d.jsonl", output_dir="/o", dataset_num_proc=3)
    assert found(facts(recipe()), facts(elsewhere)) == []
    assert found(facts(recipe()), facts(elsewhere, {"dataset": "xyz"})) == ["dataset"]
