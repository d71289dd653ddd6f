"""A chat template of axolotl is ours where it gives the same text, or the model's where it is a copy of that."""

import json

import pytest
from data_helpers import byte_level_tokenizer, open_all, write

from kit.data.chat.shipped import SHIPPED
from kit.tools.convert.axolotl_data import TEMPLATES, TURNS, put_template, take_data
from kit.tools.convert.draft import Draft, Group
from kit.tools.convert.llama_factory import TEMPLATES as OF_LLAMA_FACTORY


@pytest.mark.parametrize("templates", [TEMPLATES, OF_LLAMA_FACTORY])
def test_each_template_that_a_table_names_exists(templates):
    assert set(templates.values()) <= set(SHIPPED)


@pytest.mark.parametrize(
    ("name", "model", "template", "groups"),
    [
        ("chatml", "any/model", "chatml", []),
        ("tokenizer_default", "any/model", None, []),
        ("qwen3", "qwen", None, [Group.NEEDLESS]),
        ("qwen3", "cached/qwen", None, [Group.NEEDLESS]),
        ("qwen3", "llama", None, [Group.LEARNS]),
        ("qwen3", "Qwen/Qwen3-8B", None, [Group.LEARNS]),  # not here, so nobody knows
        ("nobody_knows", "qwen", None, [Group.LEARNS]),
    ],
)
def test_a_name_is_ours_or_looked_up_in_the_model_or_refused(name, model, template, groups, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "qwen/tokenizer_config.json", json.dumps({"chat_template": "<|im_start|>{{ messages }}"}))
    write_text(tmp_path / "llama/chat_template.jinja", "<|start_header_id|>{{ messages }}")
    cached = {("cached/qwen", "chat_template.jinja"): write_text(tmp_path / "snapshot.jinja", "<|im_start|>")}
    monkeypatch.setattr("kit.tools.convert.axolotl_data.try_to_load_from_cache", lambda *asked: cached.get(asked))
    draft = Draft({}, values={"model_name_or_path": model})
    put_template(draft, name, TEMPLATES, TURNS)
    assert draft.values.get("chat_template") == template
    assert [each.group for each in draft.left_out] == groups


def write_text(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


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


@pytest.mark.parametrize("bos", [{"bos_token": "<bos>"}, {}])
@pytest.mark.parametrize(("kind", "before"), [("alpaca", ALPACA), ("alpaca:chat", CHAT)])
def test_an_alpaca_row_becomes_the_text_that_axolotl_makes_of_it(kind, before, bos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", {"instruction": " Add", "input": "2", "output": "4 "})
    draft = Draft({"datasets": [{"path": "a.jsonl", "type": kind}], "chat_template": "qwen3"})
    take_data(draft)
    (tmp_path / "mine.jinja").write_text(draft.template)
    tokenizer = byte_level_tokenizer(**bos)
    before = before if bos else before.removeprefix("<bos>")
    data = open_all(tokenizer, dataset=draft.values["dataset"], chat_template="mine.jinja").train
    ids, weights = data[0]
    learned = [token for token, weight in zip(ids, weights, strict=True) if weight]
    assert tokenizer.decode(ids) == f"{before}4 <|endoftext|>" and tokenizer.decode(learned) == "4 <|endoftext|>"
