"""The starts of a run are listed as long as their steps count, each with its changed settings."""

import json

from kit.run.start_list import starts


def record(eval_steps=0, num_processes=1, torch="2.12", **more):
    strategy = {"type": "single", "num_processes": num_processes}
    return {"recipe": {"eval_steps": eval_steps}, "strategy": strategy, "versions": {"torch": torch}, **more}


def test_a_resumed_run_reports_changed_settings():
    first = starts("", record(), 0)
    _, second = starts(json.dumps(record(starts=first)), record(eval_steps=10, num_processes=2, torch="2.13"), 4)
    assert second["step"] == 4
    assert second["changed"] == ["eval_steps: 0 -> 10", "num_processes: 1 -> 2", "torch: 2.12 -> 2.13"]


def test_a_run_that_goes_back_forgets_later_starts():
    earlier = [{"step": step, "time": "t", "changed": []} for step in (0, 4, 8)]
    assert [each["step"] for each in starts(json.dumps(record(starts=earlier)), record(), 6)] == [0, 4, 6]
