"""The curves of a run are those of its metrics, and what cannot be compared is in two charts."""

import pytest
from report_helpers import evaluation_row, opened, record, step_row

from kit.tools.report.curves import charts_of, charts_over


def shown(charts):
    """The titles of the charts with a value, and the values of their lines."""
    return {
        c.title: [list(line.values) for line in c.series if len(line.values)]
        for c in charts
        if any(len(s.values) for s in c.series)
    }


def test_all_that_a_run_measures_is_shown_in_the_units_of_its_title(tmp_path):
    rows = [step_row(1), step_row(2, data_wait_share=0.5, rank_wait_share=0.25, gpu_utilisation=0.5), evaluation_row(2)]
    strategy = record()["strategy"] | {"device": "NVIDIA H100"}
    run = opened(tmp_path, rows, strategy=strategy, plan={"operations_per_token": 6e9 * 989.4})
    assert shown(charts_of(run)) == {
        "loss, nats per supervised token": [[4.5, 4.0], [2.25]],
        "exact match, % of the answers": [[50.0]],
        "learning rate": [[1e-3, 1e-3]],
        "gradient norm before clipping": [[0.5, 0.5]],
        "tokens per second per GPU": [[45.0, 45.0]],
        "model FLOPs utilisation, %": [[27.0, 27.0]],
        "peak memory of rank 0, GiB": [[1.0, 1.0]],
        "waiting for data, % of the time": [[1.0, 50.0]],
        "waiting for the slowest rank, % of the time": [[25.0]],
        "padding, % of the computed tokens": [[12.5, 12.5]],
        "GPU utilisation, %": [[50.0]],
    }


@pytest.mark.parametrize(
    ("settings", "changes", "name"),
    [
        ({}, {"objective": "FocalLoss"}, "FocalLoss"),
        ({"objective": "dft"}, {"objective": "DynamicFineTuning"}, "dft"),
        (
            {"label_smoothing_factor": 0.1},
            {"objective": "SmoothedLoss", "router_loss": 0.5},
            "sft, label_smoothing_factor 0.1, with the auxiliary loss of routers",
        ),
    ],
)
def test_another_objective_is_not_drawn_beside_the_evaluation_loss(tmp_path, settings, changes, name):
    recipe = record()["recipe"] | settings
    run = opened(tmp_path, [step_row(1, **changes), evaluation_row(1)], recipe=recipe)
    titles = list(shown(charts_of(run)))[:2]
    assert titles == [f"training loss ({name})", "evaluation loss, nats per supervised token"]


def test_each_data_set_has_its_line(tmp_path):
    rows = [step_row(1, **{"loss/a": 1.0}), step_row(2, **{"loss/a": 0.5, "loss/b": 2.0})]
    rows.append(evaluation_row(2, **{"eval_loss/c": 3.0, "eval_loss/d": 4.0}))
    charts = shown(charts_of(opened(tmp_path, rows)))
    assert charts["training loss by data set"] == [[1.0, 0.5], [2.0]]
    assert charts["evaluation loss by data set"] == [[3.0], [4.0]]


def test_restarts_and_the_predicted_memory_are_marked(tmp_path):
    starts = [{"step": step, "time": "2026-01-01T00:00:00+00:00", "changed": []} for step in (0, 2)]
    charts = {c.title: c for c in charts_of(opened(tmp_path, starts=starts, plan={"tensors": 2**31}))}
    assert [mark.step for mark in charts["learning rate"].marks] == [2]
    assert charts["peak memory of rank 0, GiB"].levels == [("predicted", 2.0)]
    assert charts["gradient norm before clipping"].levels == [("clipped at 1", 1.0)]


def test_several_runs_share_their_charts(tmp_path):
    runs = [opened(tmp_path / "a", [step_row(1)]), opened(tmp_path / "b", [step_row(1, loss=1.0), evaluation_row(1)])]
    charts = charts_over(runs, ["one", "other"])
    assert [(line.label, list(line.values)) for line in charts[0].series] == [("one", [4.5]), ("other", [1.0])]
    assert [list(line.values) for line in charts[1].series] == [[], [2.25]]
    assert len({line.colour for line in charts[0].series}) == 2
