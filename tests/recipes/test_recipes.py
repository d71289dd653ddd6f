"""Every file the kit ships for users to run: recipes, shapes and Accelerate configs."""

import json
import re

import pytest
import torch
from accelerate.commands.config import load_config_from_file
from transformers import AutoConfig

from kit.config.command_line import read_command_line, read_recipe
from kit.config.hints import recipe_names
from kit.config.paths import ACCELERATE_CONFIGS, RECIPES
from kit.config.recipe_file import read_yaml
from kit.config.settings.objective import DECLARED
from kit.model.pretrained.classes import auto_class

FILES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
NAMES = recipe_names()
EMBEDDED = {
    "tiny",
    "tiny-audio",
    "tiny-dpo",
    "tiny-grpo",
    "tiny-tools",
    "tiny-vision",
}  # their models and data are in recipes/tiny*/
SIZES = [name for name in NAMES if name not in EMBEDDED]
SHAPES = sorted(RECIPES / "shapes" / path.stem for path in RECIPES.glob("*.yaml") if path.stem not in EMBEDDED)
PUBLISHED = {  # the sizes of the public weights
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
}
CONFIGS = sorted(ACCELERATE_CONFIGS.glob("*.yaml"))


def stated_parameters(name):
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    number, unit = re.search(r"^# Model: .*\(([\d.]+)([MB]) parameters\)$", text, re.M).groups()
    return float(number) * {"M": 1e6, "B": 1e9}[unit]


def test_the_header_of_a_recipe_names_a_command_that_runs_it():
    for name in FILES:
        text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
        words = re.search(r"^# Launch: +accelerate launch recipes/finetune\.py(.*)$", text, re.M)[1].split()
        request = read_command_line(words)
        assert request.problems == [], name
        code = words[words.index("--tools") :] if "--tools" in words else []  # no recipe names it
        assert request.recipe == read_recipe(["--recipe", name, *code]) and request.recipe_name in (
            name,
            f"{name}-{request.recipe.method}",
            f"{name}-{request.recipe.objective}",
        ), name
        assert request.launch.config is None or (ACCELERATE_CONFIGS / f"{request.launch.config}.yaml").is_file(), name
        assert len(text.splitlines()) <= 75, name


def test_no_preference_objective_runs_with_the_rate_of_fine_tuning():
    """A rate of the file for it is near the default; without one the default is taken, and a note says so."""
    for objective in [name for name, each in DECLARED.items() if each.rows in ("preference", "unpaired_preference")]:
        for name in SIZES:
            case = objective, name
            request = read_command_line(["--recipe", name, "--objective", objective])
            recipe, default = request.recipe, DECLARED[objective].learning_rates[not name.endswith("-full")]
            assert request.problems == [] and 0.4 * default <= recipe.peak_learning_rate <= 2 * default, case
            has_own = recipe.learning_rate is not None
            assert has_own or "is for sft" in "".join(request.notes), case
            # whoever has its rate has data for it too
            assert has_own == (recipe.dataset != read_recipe(["--recipe", name]).dataset), case


def test_a_recipe_has_rewards_and_rates_for_rollouts():
    for method, rate in (("full", 1e-6), ("lora", 1e-5), ("qlora", 1e-5)):
        request = read_command_line(["--recipe", f"llama-8b-{method}", "--objective", "grpo"])
        assert request.problems == [] == request.notes and request.recipe.peak_learning_rate == rate
        assert request.recipe.rewards == ["number"] and request.recipe.max_length == 1024


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_shape_builds_and_has_the_parameters_its_recipes_state(shape):
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(shape)
        model = auto_class(config).from_config(config)
    assert abs(model.num_parameters() / stated_parameters(shape.name) - 1) < 0.005
    assert model.num_parameters() == PUBLISHED.get(shape.name, model.num_parameters())
    # What from_pretrained reads must be what was written: no key ignored or renamed on the way.
    written = json.loads((shape / "config.json").read_text(encoding="utf-8"))
    del written["_name_or_path"]  # the hub id; transformers puts the folder there
    read = model.config.to_dict()
    for part in ("text_config", "vision_config", "audio_config"):
        values = written.pop(part, {})
        for name in (
            "global_head_dim",
            "num_global_key_value_heads",
        ):  # Gemma 4 reads them into its layers' own configs
            values.pop(name, None)
        assert {key: read[part][key] for key in values} == values
    assert {key: read[key] for key in written} == written


def test_an_accelerate_config_is_one_for_accelerate_too():
    for path in CONFIGS:
        config = load_config_from_file(str(path))
        values, _ = read_yaml(path)
        assert config.mixed_precision == "bf16", path
        assert config.distributed_type.value == values["distributed_type"], path
        # One file for every machine: the number of processes is the launcher's or the script's business.
        assert "num_processes" not in values, path
        assert set(config.fsdp_config) == set(values.get("fsdp_config", {})), path
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 30, path
        assert f"accelerate launch recipes/finetune.py --config {path.stem} " in text, path
