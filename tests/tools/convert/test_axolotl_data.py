"""A chat template of axolotl is ours where it gives the same text, or the model's where it is a copy of that."""

import pytest
from data_helpers import byte_level_tokenizer, open_all, write

from kit.data.chat.shipped import SHIPPED
from kit.tools.convert.axolotl_data import OF_MODELS, TEMPLATES, put_template, take_data
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


ALPACA = """\
<bos>Below is an instruction that describes a task, paired with an input that provides further context. \
Write a response that appropriately completes the request.

### Instruction:
 Add

### Input:
2

### Response:
"""
CHAT = """\
<bos>SYSTEM: Below is an instruction that describes a task, paired with an input that provides further context. \
Write a response that appropriately completes the request.
USER:  Add
2
ASSISTANT:"""


@pytest.mark.parametrize(("kind", "before"), [("alpaca", ALPACA), ("alpaca:chat", CHAT)])
def test_an_alpaca_row_becomes_the_text_that_axolotl_makes_of_it(kind, before, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", {"instruction": " Add", "input": "2", "output": "4 "})
    draft = Draft({"datasets": [{"path": "a.jsonl", "type": kind}], "chat_template": "qwen3"})
    take_data(draft)
    (tmp_path / "mine.jinja").write_text(draft.template)
    tokenizer = byte_level_tokenizer(bos_token="<bos>")
    data = open_all(tokenizer, dataset=draft.values["dataset"], chat_template="mine.jinja").train
    ids, weights = data[0]
    learned = [token for token, weight in zip(ids, weights, strict=True) if weight]
    assert tokenizer.decode(ids) == f"{before}4 <|endoftext|>" and tokenizer.decode(learned) == "4 <|endoftext|>"
