"""A file is recognised, or the message says what it is; a value of a wrong kind is a message, not a traceback."""

import re
import sys

import pytest
from helpers import ROOT

from kit.config.recipe import Recipe
from kit.errors import UserError
from kit.tools.convert.convert import KITS, convert


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n", "key: value lines"),
        ("a: [\n", "not valid YAML"),
        ("some: 1\n", "no file of a known kit"),
        ("model_name_or_path: m\ndataset: d\n", "kit train --recipe"),
        ("base_model: m\nsequence_len: [many]\ndatasets: [{path: d, type: chat_template}]\n", "max_length"),
        ("base_model: m\nmicro_batch_size: 1e400\n", "a value of a wrong kind"),
        ("base_model: m\nmicro_batch_size: many\n", "a value of a wrong kind"),
        ("base_model: m\ndatasets: 3\nsequence_len: 8\nval_set_size: {}\n", "datasets"),
        ("stage: sft\nfinetuning_type: [lora]\ncutoff_len: 5\n", "trains nothing"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_converted_is_refused_with_what_is_wrong(converted, text, says):
    with pytest.raises(UserError, match=says):
        converted(text)


def test_a_key_that_is_given_twice_is_refused(converted):
    with pytest.raises(UserError, match="second time"):
        converted("base_model: m\nbase_model: n\n")


def test_a_file_that_is_not_there_is_a_message(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        convert(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("kit", KITS)
def test_each_table_names_what_it_was_read_from(kit):
    module = sys.modules[KITS[kit].__module__]
    assert re.search(r"[Rr]ead\s+from (.*\d\.\d+|commit)", module.__doc__, re.DOTALL)


@pytest.mark.parametrize("kit", KITS)
def test_each_key_that_a_table_renames_becomes_a_setting_that_exists(kit):
    module = sys.modules[KITS[kit].__module__]
    assert set(getattr(module, "RENAMES", {}).values()) <= set(Recipe.model_fields)


AXOLOTL = {"base_model": "m", "sequence_len": 64, "min_sample_len": 5}
OWN = {"path": "rows.jsonl", "type": "oasst_of_ours", "roles": {"assistant": ["bot"]}}


def test_all_that_the_user_must_decide_is_said_in_one_answer(converted):
    with pytest.raises(UserError) as refused:
        converted(AXOLOTL | {"datasets": [OWN], "base_model": "$1"})
    text = str(refused.value)
    assert "datasets[0].type" in text and "--drop min_sample_len leaves it out" in text
    assert "--model_name_or_path NAME" in text and "dataset: missing" not in text
    with pytest.raises(UserError) as refused:
        converted(AXOLOTL | {"sequence_len": 3})
    assert [problem.where.rpartition(" ")[2] for problem in refused.value.problems] == [
        "min_sample_len",
        "sequence_len",
        "dataset",
    ]


def test_another_kind_of_training_is_refused_alone(converted):
    with pytest.raises(UserError) as refused:
        converted(AXOLOTL | {"rl": "grpo", "datasets": [OWN]})
    assert [problem.where for problem in refused.value.problems] == ["rl"]


def test_data_that_are_typed_settle_what_is_wrong_with_those_of_the_file(converted):
    given = {**AXOLOTL, "min_sample_len": None, "datasets": [OWN, {"path": "a/b", "type": "alpaca", "strange": 1}]}
    with pytest.raises(UserError, match=r"datasets\[1\].strange"):
        converted(given)
    assert converted(given, flags={"dataset": "mine.jsonl"})[1].dataset == "mine.jsonl"


def test_a_chat_template_whose_tokens_the_typed_model_lacks_is_a_decision(converted, tmp_path):
    given = {**AXOLOTL, "min_sample_len": None, "datasets": [{"path": "a.jsonl", "type": "chat_template"}]}
    given["chat_template"] = "llama3"
    assert converted(given)[1].chat_template == "llama3"
    flags = {"model_name_or_path": str(ROOT / "recipes/tiny/model")}
    with pytest.raises(UserError, match=r"(?s)lacks <\|start_header_id\|>.*--drop chat_template"):
        converted(given, flags=flags)
    assert converted(given, flags=flags, drop=["chat_template"])[1].chat_template is None
    assert converted(given, flags={**flags, "chat_template": "zephyr"})[1].chat_template == "zephyr"
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/tokenizer.json").write_text("{")
    assert converted(given, flags={"model_name_or_path": "broken"})[1].chat_template == "llama3"
    tokens = {"new_tokens": "<|start_header_id|>,<|end_header_id|>,<|eot_id|>"}
    assert converted(given, flags={**flags, **tokens})[1].chat_template == "llama3"


def test_the_weight_of_a_loss_of_routers_goes_with_a_model_that_has_some(converted):
    given = {**AXOLOTL, "min_sample_len": None, "datasets": [{"path": "a.jsonl", "type": "chat_template"}]}
    given["router_aux_loss_coef"] = 0.01
    assert converted(given)[1].router_aux_loss_coef == 0.01
    result, recipe = converted(given, flags={"model_name_or_path": str(ROOT / "recipes/tiny/model")})
    assert recipe.router_aux_loss_coef is None
    assert [each.key for each in result.draft.left_out] == ["router_aux_loss_coef"]
