"""A path in the folder of a run is known to be of that run, and what it is scored with to be what was trained."""

import json

import pytest
from helpers import actual_strategy

from kit.config.recipe import Recipe
from kit.run.opening import otherwise_than_trained, run_of


def test_final_and_checkpoints_belong_to_their_run(tmp_path):
    run = tmp_path / "run"
    for path in (run / "final", run / "checkpoints/step-00000001", tmp_path / "other/final"):
        path.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    assert run_of(str(run / "final")) == run_of(str(run / "checkpoints/step-00000001")) == run / "run.json"
    assert run_of(str(tmp_path / "other/final")) is None and run_of("owner/model") is None


@pytest.mark.parametrize(
    ("of_run", "scored", "flag"),
    [
        ({"method": "qlora"}, {"method": "lora"}, "--method qlora"),
        ({"method": "qlora"}, {"method": "qlora"}, None),
        ({"qat": "int4_weight_only", "qat_group_size": 8}, {}, "--qat int4_weight_only --qat_group_size 8 "),
        ({"qat": "int4_weight_only"}, {"qat": "int4_weight_only"}, None),
        ({}, {}, None),
    ],
)
def test_weights_that_are_other_ones_than_trained_are_said_with_the_flag_that_takes_those(
    tmp_path, of_run, scored, flag
):
    def recipe(values):
        return Recipe(model_name_or_path="m", dataset="d", **values)

    (tmp_path / "final").mkdir()
    record = {"recipe": recipe(of_run).model_dump(), "strategy": actual_strategy().record()}
    (tmp_path / "run.json").write_text(json.dumps(record))
    said = otherwise_than_trained(str(tmp_path / "final"), recipe(scored))
    assert [flag in line for line in said] == ([True] if flag else [])
