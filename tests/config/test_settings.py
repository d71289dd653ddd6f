"""A function that needs some settings takes their part, which can be made without the others."""

import pytest
from pydantic import ValidationError

from kit.config.recipe import IDENTITY, Recipe
from kit.config.settings.data import DataSettings
from kit.config.settings.evaluation import EvalSettings
from kit.config.settings.method import MethodSettings
from kit.config.settings.model import ModelSettings
from kit.config.settings.objective import ObjectiveSettings
from kit.config.settings.optimisation import OptimSettings
from kit.config.settings.output import OutputSettings
from kit.config.settings.process import ProcessSettings

PARTS = [
    MethodSettings,
    DataSettings,
    ObjectiveSettings,
    OptimSettings,
    EvalSettings,
    OutputSettings,
    ProcessSettings,
]


def test_a_recipe_has_each_setting_of_its_parts_once_and_no_other():
    names = [name for part in PARTS for name in part.model_fields]
    assert sorted(names) == sorted(set(names)) == sorted(Recipe.model_fields)
    assert list(Recipe.model_fields) == names, "the order of --help and of the schema"


def test_a_part_has_its_defaults_without_the_others_and_refuses_their_keys():
    assert OptimSettings().micro_batch_size == 1 and not EvalSettings().has_evaluation
    assert ModelSettings(model_name_or_path="m").attn_implementation == "auto"
    assert MethodSettings(model_name_or_path="m", method="full").method == "full"
    with pytest.raises(ValidationError):
        OptimSettings(max_length=8)


def test_what_changes_the_steps_identifies_a_run_and_what_only_watches_them_does_not():
    assert {"seed", "learning_rate", "packing", "lora_r", "model_name_or_path"} <= set(IDENTITY)
    assert not {"logging_steps", "output_dir", "eval_steps", "per_device_train_batch_size"} & set(IDENTITY)
