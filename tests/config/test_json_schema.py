"""The JSON schema of recipes says of a file what the kit says of it."""

import re

import pytest
import yaml
from config_helpers import accepted, problems

from kit.config.json_schema import recipe_schema
from kit.config.paths import RECIPES
from kit.config.recipe import Recipe
from kit.schema.fields import json_or_string

SCHEMA = recipe_schema()
TYPES = {"string": str, "number": (int, float), "integer": int, "boolean": bool, "array": list, "object": dict}


def fits(value, schema):
    """Whether a value is valid by those keywords of JSON schema that the schema has."""
    known = (
        "type anyOf $ref enum const pattern properties additionalProperties items minItems minLength default required"
    )
    known += " description propertyNames minimum maximum exclusiveMinimum exclusiveMaximum $schema title $defs"
    assert schema.keys() <= {*known.split()}, schema
    if "$ref" in schema:
        target = SCHEMA
        for name in schema["$ref"].split("/")[1:]:
            target = target[name]
        return fits(value, target)
    types = schema.get("type", [])
    types = tuple(TYPES[name] for name in ([types] if isinstance(types, str) else types))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_number = isinstance(value, int | float)
    return (
        (not types or any(isinstance(value, each) and (type(value) is not bool or each is bool) for each in types))
        and ("anyOf" not in schema or any(fits(value, each) for each in schema["anyOf"]))
        and ("enum" not in schema or value in schema["enum"])
        and ("const" not in schema or value == schema["const"])
        and (not isinstance(value, str) or re.search(schema.get("pattern", ""), value) is not None)
        and (not isinstance(value, str) or len(value) >= schema.get("minLength", 0))
        and (not is_number or schema.get("minimum", value) <= value <= schema.get("maximum", value))
        and (not is_number or not value <= schema.get("exclusiveMinimum", value - 1))
        and (not is_number or not value >= schema.get("exclusiveMaximum", value + 1))
        and (not isinstance(value, list) or len(value) >= schema.get("minItems", 0))
        and (not isinstance(value, list) or all(fits(each, schema.get("items", {})) for each in value))
        and (not isinstance(value, dict) or value.keys() >= {*schema.get("required", [])})
        and (not isinstance(value, dict) or all(_member_fits(*each, schema) for each in value.items()))
    )


def _member_fits(name, value, schema):
    others = schema.get("additionalProperties", {})
    member = schema.get("properties", {}).get(name, others)
    return member is True or (member is not False and fits(value, member))


def as_yaml_1_2(text):
    """The values as an editor reads them: 1e-4 is a number."""

    def empty_is_null(value):
        if isinstance(value, dict):
            return {key: empty_is_null(each) for key, each in value.items()}
        return [empty_is_null(each) for each in value] if isinstance(value, list) else None if value == "" else value

    return json_or_string(empty_is_null(yaml.load(text, yaml.BaseLoader)))


def test_it_has_every_setting_with_its_help():
    assert set(SCHEMA["properties"]) == {*Recipe.model_fields, "by_method", "by_objective"} - {"tools", "environment"}
    for name, setting in SCHEMA["properties"].items():
        if info := Recipe.model_fields.get(name):
            assert setting["description"].startswith(info.description)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_it_accepts_the_shipped_recipes(path):
    assert fits(as_yaml_1_2(path.read_text(encoding="utf-8")), SCHEMA)


RIGHT = """
learning_rate: 1e-4
learning_rate: "1e-4"
max_steps: 3.0
max_steps: 1_000
max_steps:
max_steps: none
model_revision: 0123
output_dir: 2024-01-01
report_to: wandb
report_to: none
report_to:
save_strategy: no
save_steps: auto
torch_compile: true
lora_target_modules: [q_proj, v_proj]
lora_target_modules: q_proj,v_proj
dataset: a.jsonl,b.jsonl
dataset: [a.jsonl, {path: b.jsonl, columns: question=prompt, max_samples: 0.5}]
dataset_columns: {question: prompt}
dataset_columns: question=prompt
chat_template_kwargs: a=false
chat_template_kwargs: {a: False, b: {c: false, d: [1, x]}}
eval_split_size: 200
by_objective: {dpo: {beta: 0.2, learning_rate: 1e-6}}
by_method: {full: {learning_rate: 1e-5, by_objective: {dpo: {learning_rate: 1e-6}}}}
""".strip().splitlines()
WRONG = """
learning_rat: 1e-4
learning_rate: fast
max_steps: 0
max_steps: 2.5
seed:
seed: 2147483648
method: loraa
save_steps: never
torch_compile: maybe
dataset: [{pth: b.jsonl}]
dataset: {path: b.jsonl}
dataset: [{path: b.jsonl, max_samples: 0}]
report_to: [wandbb]
metrics: ["my_metric.py:close"]
rewards: [nubmer]
push_to_hub: me
by_method: {fulll: {seed: 1}}
by_method: {lora: {method: lora}}
by_method: {lora: {by_method: {lora: {seed: 1}}}}
by_objective: {dpo: {objective: dpo}}
by_objective: {dpo: {by_objective: {dpo: {beta: 0.2}}}}
""".strip().splitlines()


@pytest.mark.parametrize("line", RIGHT)
def test_it_accepts_what_the_kit_accepts(line, recipe_file):
    assert fits(as_yaml_1_2(line), SCHEMA)
    accepted(_of(line, recipe_file))


@pytest.mark.parametrize("line", WRONG)
def test_it_refuses_what_the_kit_refuses(line, recipe_file):
    assert not fits(as_yaml_1_2(line), SCHEMA)
    assert problems(_of(line, recipe_file))


def _of(line, recipe_file):
    return (
        recipe_file(f"model_name_or_path: some/model\n{line}", base=False) if "dataset:" in line else recipe_file(line)
    )
