"""What a row holds besides its format: counted where it does no harm, refused where it would change what is learned."""

import json

import pytest
from data_helpers import ANSWER, USER, open_all, write

from kit.data.chat.columns import choose_fields
from kit.data.chat.messages import ROLES
from kit.data.chat.unused import Unused
from kit.errors import UserError

PAIR = {"prompt": "a", "completion": "b"}
CHAT = {"messages": [USER, ANSWER]}
ALPACA = {"instruction": "a", "output": "b"}


def looked(row, mapping=None):
    """The problems of a row, as one string, and what is counted of it."""
    mapping = mapping or {}
    unused = Unused(choose_fields(list(row), mapping, "train.jsonl"), [k for k, v in mapping.items() if v == "ignore"])
    reported = "\n".join(map(str, unused.check(row)))
    return reported, dict(unused.counts)


def answer(**keys):
    return {"messages": [USER, ANSWER | keys]}


HARMFUL = [
    (PAIR | {"images": ["a.png"]}, "images", "media, and only text is learned from"),
    ({"text": "a", "image": {"bytes": "x"}}, "image", "media"),
    (answer(images=["a.png"]), "messages.images", "media"),
    (CHAT | {"history": [["a", "b"]]}, "history", "earlier turns, which only instruction and output can have"),
    (PAIR | {"history": [["a", "b"]]}, "history", "--dataset_columns prompt=instruction,completion=output"),
    (PAIR | {"label": False}, "label", "false: an answer marked as bad would be learned"),
    (CHAT | {"label": "False"}, "label", "an answer marked as bad"),
    (PAIR | {"kto_tag": 0}, "kto_tag", "0: an answer marked as bad"),
    (ALPACA | {"weight": 0.5}, "weight", "a weight of the row (0.5)"),
    (CHAT | {"loss_weight": "2"}, "loss_weight", "a weight of the row (2)"),
    (CHAT | {"train": False}, "train", "a row that is not to be learned from"),
    (answer(train_detail=[{"begin_offset": 0}]), "messages.train_detail", "only whole messages can be chosen"),
    (answer(loss_weight=0.5), "messages.loss_weight", "call it weight, on assistant turns"),
    (answer(loss=False), "messages.loss", "false: how much is learned from a message\n    -> call it train"),
    (answer(training=False), "messages.training", "call it train"),
    ({"messages": [USER | {"loss": True}, ANSWER]}, "messages.loss", "true: how much is learned"),
    (answer(label=False), "messages.label", "an answer marked as bad"),
    (answer(content=[{"type": "text", "text": "a", "train": False}]), "messages.content.train", "only whole messages"),
    ({"text": "a", "role": "prompter", "parent_id": None}, "role", "a row for each message of a conversation"),
    ({"text": "a", "parent_id": "7"}, "parent_id", "a row for each message of a conversation"),
    (CHAT | {"system": "Be kind"}, "system", "--dataset_columns messages=conversations"),
    (PAIR | {"system_prompt": "Be kind"}, "system_prompt", "completion=output,system_prompt=system reads a chat"),
    (ALPACA | {"tools": [{"name": "add"}]}, "tools", "tools of the assistant"),
    (CHAT | {"functions": [{"name": "add"}]}, "functions", "--dataset_columns functions=tools"),
    ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "attention_mask", "masks tokens, which would be learned"),
    ({"input_ids": [1, 2], "completion_mask": [0, 1]}, "completion_mask", "give labels, -100"),
    ({"input_ids": [1, 2], "position_ids": [0, 0]}, "position_ids", "packed samples would see each other"),
]


@pytest.mark.parametrize(("row", "name", "message"), HARMFUL)
def test_what_would_change_what_is_learned_is_refused_unless_it_is_ignored_on_purpose(row, name, message):
    reported, counts = looked(row)
    assert reported.startswith(f"{name}: ") and message in reported and counts[name] == 1
    assert f"add {name}=ignore to --dataset_columns" in reported
    reported, counts = looked(row, {name: "ignore", **({"text": "text"} if "text" in row else {})})
    assert not reported and counts[name] == 1


@pytest.mark.parametrize(
    "row",
    [
        PAIR | {"images": [], "history": None, "label": True, "weight": 1.0, "train": True},
        CHAT | {"label": 3, "system": "", "weight": "1"},
        {"text": "a", "label": 0, "role": None},
        {"input_ids": [1, 2], "attention_mask": [1, 1], "position_ids": [0, 1], "label": 0},
        {"messages": [USER | {"loss": False, "loss_weight": 0}, ANSWER | {"loss": True, "loss_weight": 1.0}]},
        answer(train=False, weight=0, name="Ann", reasoning_content="hm"),
        ALPACA | {"history": [["a", "b"]], "system": "Be kind"},
    ],
)
def test_what_changes_nothing_is_not_refused(row):
    assert looked(row)[0] == ""


def test_json_in_a_string_that_is_no_message_has_no_keys_that_could_be_read():
    records = json.dumps([{"id": 1, "label": False, "image": "a.png"}])
    assert looked({"prompt": "a", "completion": records}) == looked({"instruction": "a", "output": records}) == ("", {})
    messages = json.dumps([USER | {"image": "a.png"}])
    assert "instruction.image: media" in looked({"instruction": messages, "output": "b"})[0]


def test_what_is_not_used_is_counted_once_a_row():
    row = {"messages": [USER | {"id": 1}, ANSWER | {"id": 2, "model": None}], "source": "web", "url": "", "score": 0}
    assert looked(row)[1] == {"source": 1, "score": 1, "messages.id": 1}
    text = row | {"messages": json.dumps(row["messages"])}  # as in a table of cells
    assert looked(text)[1] == looked(row)[1]
    parts = {"messages": [USER, ANSWER | {"content": [{"type": "text", "text": "a", "cache_control": {"a": 1}}]}]}
    assert looked(parts)[1] == {"messages.content.cache_control": 1}
    sharegpt = {"conversations": [{"from": role, "value": "a", "markdown": "x"} for role in ("human", "gpt")]}
    assert looked(sharegpt)[1] == {"conversations.markdown": 1} and "human" not in ROLES


@pytest.mark.parametrize("more", [{"labels": [1]}, {"attention_mask": [0, 1]}, {"position_ids": [0]}])
def test_a_row_without_the_ids_of_the_others_is_looked_at_too(more):
    assert Unused({"input_ids": "input_ids"}, ()).check({"attention_mask": [1], **more}) is not None


def test_a_key_of_messages_that_is_read_can_be_ignored_on_purpose(tmp_path, tokenizer):
    rows = [{"messages": [USER, ANSWER | {"thinking": f"Hm {i}"}]} for i in range(3)]
    write(tmp_path / "a.jsonl", *rows)
    flags = {"dataset": str(tmp_path / "a.jsonl"), "chat_template": "chatml"}
    with pytest.raises(UserError, match="reasoning_content"):
        open_all(tokenizer, **flags)
    train = open_all(tokenizer, **flags, dataset_columns="messages.thinking=ignore").train
    write(tmp_path / "a.jsonl", *({"messages": [USER, ANSWER]} for _ in rows))
    plain = open_all(tokenizer, **flags).train
    assert [train[i][0].tolist() for i in range(3)] == [plain[i][0].tolist() for i in range(3)]
    # chatml writes no names, so both are learned from, but a run with one is not a run with the other
    named = open_all(tokenizer, **flags, dataset_columns="messages.name=ignore").train
    assert named.fingerprint != plain.fingerprint
