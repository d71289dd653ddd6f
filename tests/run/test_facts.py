"""What every machine must share: settings and code are compared, paths by what they hold."""

import pytest

from kit.run import facts as facts_module
from kit.run.facts import compared_facts
from kit.strategy.agreement import compare_facts
from kit.strategy.strategies import DDP
from kit.strategy.topology import Topology

TOPOLOGY = Topology(strategy=DDP, config_name="ddp", num_processes=2, mixed_precision="no", device_type="cpu")
CONTENT = {"dataset": "abc"}


def found(one, other):
    """The fields in which two ranks differ: those refused, and the text of the warnings."""
    problems, warnings = compare_facts([one, other], ["a", "b"])
    return [problem.where for problem in problems], " ".join(warnings)


def test_a_setting_that_differs_is_refused(recipe):
    for changes in ({"learning_rate": 1e-4}, {"per_device_train_batch_size": 4}, {"logging_steps": 5}):
        assert found(
            compared_facts(recipe(), TOPOLOGY, CONTENT), compared_facts(recipe(**changes), TOPOLOGY, CONTENT)
        ) == (
            [*changes],
            "",
        ), changes


def test_a_path_may_differ_and_its_content_not(recipe):
    own = compared_facts(recipe(), TOPOLOGY, CONTENT)
    elsewhere = recipe(model_name_or_path="/m", dataset="/d.jsonl", output_dir="/o", dataset_num_proc=3)
    assert found(own, compared_facts(elsewhere, TOPOLOGY, CONTENT)) == ([], "")
    assert found(own, compared_facts(elsewhere, TOPOLOGY, {"dataset": "xyz"})) == (["dataset"], "")


@pytest.mark.parametrize("library", ["torch", "bitsandbytes"])
def test_another_version_is_refused_where_ranks_would_not_fit(recipe, monkeypatch, library):
    own = compared_facts(recipe(), TOPOLOGY, CONTENT)
    versions = facts_module.machine_versions()
    monkeypatch.setattr(facts_module, "machine_versions", lambda: versions | {library: "0.0.1"})
    refused, warned = found(own, compared_facts(recipe(), TOPOLOGY, CONTENT))
    if library in ("bitsandbytes", "Python"):
        assert refused == [] and f"warning: {library}: " in warned and "0.0.1 on b (rank 1)" in warned
    else:
        assert (refused, warned) == ([library], "")


def test_settings_of_nccl_are_a_warning_and_its_interface_belongs_to_the_machine(recipe, monkeypatch):
    own = compared_facts(recipe(), TOPOLOGY, CONTENT)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert found(own, compared_facts(recipe(), TOPOLOGY, CONTENT)) == ([], "")
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    refused, warned = found(own, compared_facts(recipe(), TOPOLOGY, CONTENT))
    assert refused == [] and "NCCL_IB_DISABLE: not set on a (rank 0), 1 on b (rank 1)" in warned
