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
    ("of_run", "scored", "precisions", "flag"),
    [
        ({"method": "qlora"}, {"method": "lora"}, "bf16 bf16", "--method qlora"),
        ({"method": "qlora"}, {"method": "qlora"}, "no no", None),
        (
            {"qat": "int4_weight_only", "qat_group_size": 8},
            {},
            "bf16 bf16",
            "--qat int4_weight_only --qat_group_size 8 ",
        ),
        ({"qat": "int4_weight_only"}, {"qat": "int4_weight_only"}, "bf16 bf16", None),
        ({}, {}, "bf16 bf16", None),
        ({}, {}, "bf16 no", "in bf16, and here it is float32: --config single, or another with mixed_precision: bf16"),
        ({}, {}, "no bf16", "in float32, and here it is bf16: a config with mixed_precision: no"),
    ],
)
def test_what_is_computed_otherwise_than_trained_is_said_with_the_flag_that_computes_as_trained(
    tmp_path, of_run, scored, precisions, flag
):
    def recipe(values):
        return Recipe(model_name_or_path="m", dataset="d", **values)

    trained, computed = precisions.split()
    (tmp_path / "final").mkdir()
    strategy = actual_strategy(mixed_precision=trained).record()
    (tmp_path / "run.json").write_text(json.dumps({"recipe": recipe(of_run).model_dump(), "strategy": strategy}))
    said = otherwise_than_trained(str(tmp_path / "final"), recipe(scored), computed)
    assert [flag in line for line in said] == ([True] if flag else [])
