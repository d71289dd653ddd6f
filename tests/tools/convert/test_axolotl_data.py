"""A chat template of axolotl is ours where it gives the same text, or the model's where it is a copy of that."""

import pytest

from kit.data.chat.shipped import SHIPPED
from kit.tools.convert.axolotl_data import OF_MODELS, TEMPLATES, put_template
from kit.tools.convert.draft import Draft, Group
from kit.tools.convert.llama_factory import TEMPLATES as OF_LLAMA_FACTORY
from kit.tools.convert.torchtune_data import TEMPLATES as OF_TORCHTUNE


@pytest.mark.parametrize("templates", [TEMPLATES, OF_LLAMA_FACTORY, OF_TORCHTUNE])
def test_each_template_that_a_table_names_exists(templates):
    assert set(templates.values()) <= set(SHIPPED)


@pytest.mark.parametrize(
    ("name", "model", "template", "groups"),
    [
        ("chatml", "any/model", "chatml", []),
        ("tokenizer_default", "any/model", None, []),
        ("qwen3", "Qwen/Qwen3-8B", None, [Group.NEEDLESS]),
        ("qwen3", "meta-llama/Llama-3.2-1B", None, [Group.LEARNS]),
        ("nobody_knows", "Qwen/Qwen3-8B", None, [Group.LEARNS]),
    ],
)
def test_a_name_is_ours_or_the_models_or_refused(name, model, template, groups):
    draft = Draft({}, values={"model_name_or_path": model})
    put_template(draft, name, TEMPLATES, OF_MODELS)
    assert draft.values.get("chat_template") == template
    assert [each.group for each in draft.left_out] == groups
