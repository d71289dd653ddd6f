"""What a row holds besides its format: counted where it does no harm, refused where it would change what is learned."""

import json

import pytest
from data_helpers import ANSWER, SYSTEM, USER, open_all, write

from kit.data.chat.columns import choose_fields
from kit.data.chat.messages import ROLES
from kit.data.chat.unused import Unused
from kit.errors import UserError

PAIR = {"prompt": "a", "completion": "b"}
CHAT = {"messages": [USER, ANSWER]}
ALPACA = {"instruction": "a", "output": "b"}
IDS = {"input_ids": [1, 2]}
CALL = {"name": "add", "arguments": {"a": 1}}
RESULT = {"role": "tool", "content": "3", "name": "add", "tool_call_id": "1"}
TEMPLATE = "{{ messages if enable_thinking or thinking else reasoning_effort }}"
PREFERRED = {"chosen": "b", "rejected": "c"}
LISTS = {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]}


def looked(row, mapping=None, wanted="answers"):
    """The problems of a row, as one string, and what is counted of it."""
    mapping = mapping or {}
    fields = choose_fields(list(row), mapping, "train.jsonl", wanted=wanted)
    unused = Unused(fields, [k for k, v in mapping.items() if v == "ignore"], TEMPLATE)
    reported = "\n".join(map(str, unused.check(row)))
    return reported, dict(unused.counts)


def answer(**keys):
    return {"messages": [USER, ANSWER | keys]}


# Rows, and the column or key in each that must not be ignored unseen.
HARMFUL = [
    (PAIR | {"images": ["a.png"]}, "images"),
    ({"text": "a", "image": {"bytes": "x"}}, "image"),
    (answer(images=["a.png"]), "messages.images"),
    (CHAT | {"history": [["a", "b"]]}, "history"),
    (PAIR | {"history": [["a", "b"]]}, "history"),
    ({"prompt": [USER], "completion": [ANSWER], "system": "Be kind"}, "system"),
    (PAIR | {"label": False}, "label"),
    (CHAT | {"label": "False"}, "label"),
    (PAIR | {"kto_tag": 0}, "kto_tag"),
    (ALPACA | {"weight": 0.5}, "weight"),
    (CHAT | {"loss_weight": "2"}, "loss_weight"),
    *[(CHAT | {"train": value}, "train") for value in (False, 0, "0", "no")],
    (PAIR | {"training": False}, "training"),
    *[(PAIR | {"label": value}, "label") for value in (-1, "-1", -0.5)],
    (CHAT | {"loss_multiplier": 0.0}, "loss_multiplier"),
    *[
        (row | {name: value}, name)
        for row in (CHAT, PAIR, {"text": "a"})
        for name, value in (("loss_mask", [0, 1]), ("response_mask", "[0, 1]"), ("loss_mask", 0), ("mask", "User"))
    ],
    (PAIR | {"labels": [-100, 5]}, "labels"),
    (CHAT | IDS | {"labels": [-100, 2]}, "labels"),
    (CHAT | {"documents": [{"title": "a"}]}, "documents"),
    (CHAT | {"enable_thinking": False}, "enable_thinking"),
    (PAIR | {"reasoning_effort": "low"}, "reasoning_effort"),
    (CHAT | {"thinking": True}, "thinking"),
    (PAIR | {"context": "Once"}, "context"),
    (PAIR | {"input": "2, 2"}, "input"),
    (ALPACA | {"context": "Once"}, "context"),
    (PAIR | {"chat_history": [["a", "b"]]}, "chat_history"),
    ({"text": "a", "history": [["a", "b"]]}, "history"),
    (PAIR | {"tool_calls": [CALL]}, "tool_calls"),
    (PAIR | {"reasoning_content": "Hm"}, "reasoning_content"),
    (CHAT | {"reasoning_content": "Hm"}, "reasoning_content"),
    ({"instruction": "a", "tool_calls": [CALL | {"result": 4}]}, "tool_calls.result"),
    ({"text": "a", "system": "Be kind"}, "system"),
    ({"text": "a", "tools": [{"name": "add"}]}, "tools"),
    (PAIR | {"image_url": "a.png"}, "image_url"),
    (answer(train_detail=[{"begin_offset": 0}]), "messages.train_detail"),
    (answer(loss_weight=0.5), "messages.loss_weight"),
    (answer(loss=False), "messages.loss"),
    (answer(training=False), "messages.training"),
    (answer(loss_mask=0), "messages.loss_mask"),
    (answer(loss_mask=[0, 1]), "messages.loss_mask"),
    (answer(step_loss_mask=0), "messages.step_loss_mask"),
    (answer(trainable=False), "messages.trainable"),
    (answer(masked=True), "messages.masked"),
    *[(answer(mask=value), "messages.mask") for value in (1, 0, True)],
    (answer(label=-1), "messages.label"),
    *[
        (answer(**{name: "Hm"}), f"messages.{name}")
        for name in (
            "thought",
            "thoughts",
            "cot",
            "reasoning_text",
            "chain_of_thought",
            "reasoningContent",
            "tool_plan",
        )
    ],
    (answer(reasoning_details=[{"text": "Hm"}]), "messages.reasoning_details"),
    *[({"messages": [USER | {name: ["a.png"]}, ANSWER]}, f"messages.{name}") for name in ("image_url", "video_path")],
    *[({"messages": [USER | {name: "a.py"}, ANSWER]}, f"messages.{name}") for name in ("file", "files")],
    (answer(content=[{"type": "text", "text": "a", "image": "x"}]), "messages.content.image"),
    (answer(toolCalls=[CALL]), "messages.toolCalls"),
    (answer(additional_kwargs={"tool_calls": [CALL]}), "messages.additional_kwargs"),
    (answer(channel="analysis"), "messages.channel"),
    (answer(recipient="functions.add"), "messages.recipient"),
    ({"messages": [{"role": "tool", "content": "2", "tool_use_id": "c1"}, ANSWER]}, "messages.tool_use_id"),
    (answer(value="Bye"), "messages.value"),
    ({"messages": [USER | {"from": "gpt"}, ANSWER]}, "messages.from"),
    (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "content": "c"}]},
        "conversations.content",
    ),
    *[
        (answer(tool_calls=calls), "messages.tool_calls.result")
        for calls in ([CALL | {"result": 4}], [{"function": CALL | {"result": 4}}], [{"function": CALL, "result": 4}])
    ],
    (answer(tool_calls=[{"function": {"name": "add"}, "arguments": {"a": 1}}]), "messages.tool_calls.arguments"),
    (answer(function_call=json.dumps(CALL | {"kwargs": {"b": 2}})), "messages.function_call.kwargs"),
    (
        {"conversations": [{"from": "function_call", "value": json.dumps(CALL | {"params": {"b": 2}})}]},
        "conversations.value.params",
    ),
    ({"messages": [USER | {"loss": True}, ANSWER]}, "messages.loss"),
    (answer(label=False), "messages.label"),
    (answer(content=[{"type": "text", "text": "a", "train": False}]), "messages.content.train"),
    ({"text": "a", "role": "prompter", "parent_id": None}, "role"),
    ({"text": "a", "parent_id": "7"}, "parent_id"),
    (CHAT | {"system": "Be kind"}, "system"),
    (PAIR | {"system_prompt": "Be kind"}, "system_prompt"),
    (ALPACA | {"tools": [{"name": "add"}]}, "tools"),
    (CHAT | {"functions": [{"name": "add"}]}, "functions"),
    ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "attention_mask"),
    ({"input_ids": [1, 2], "completion_mask": [0, 1]}, "completion_mask"),
    *[(IDS | {"attention_mask": mask}, "attention_mask") for mask in ("[1, 0]", "1 0", [1, 2], [1.0, 0.0])],
    ({"input_ids": [1, 2], "position_ids": [0, 0]}, "position_ids"),
    (IDS | {"seq_lengths": [1, 1]}, "seq_lengths"),
    (IDS | {"cu_seqlens": [0, 1, 2]}, "cu_seqlens"),
    (IDS | {"segment_ids": [0, 1]}, "segment_ids"),
]
OF_PAIRS = [
    ({"prompt": "a", **PREFERRED, "context": "d"}, "context"),
    ({"prompt": "a", **PREFERRED, "history": [["a", "b"]]}, "history"),
    (LISTS | {"functions": [{"name": "add"}]}, "functions"),
    (LISTS | {"system_prompt": "d"}, "system_prompt"),
    (LISTS | {"prompt": [SYSTEM, USER], "system_prompt": "Be brief"}, "system_prompt"),
    ({"prompt": "a", **PREFERRED, "images": ["a.png"]}, "images"),
    (LISTS | {"chosen": [ANSWER | {"image": "a"}]}, "chosen.image"),
    (LISTS | {"rejected": [ANSWER | {"loss": 0}]}, "rejected.loss"),
    (LISTS | {"prompt": [USER | {"image": "a"}]}, "prompt.image"),
    (PREFERRED | {"question": "a"}, "question"),  # what both answers begin with would be the prompt
]


@pytest.mark.parametrize(("cases", "wanted"), [(HARMFUL, "answers"), (OF_PAIRS, "pairs")])
def test_what_would_change_what_is_learned_is_refused_unless_it_is_ignored_on_purpose(cases, wanted):
    for row, name in cases:
        mapping = {"text": "text"} if "text" in row else {}
        reported, counts = looked(row, mapping, wanted)
        assert reported.startswith(f"{name}: ") and counts[name] == 1, (row, reported)
        assert f"to ignore it, add {name}=ignore to --dataset_columns" in reported
        reported, counts = looked(row, {name: "ignore", **mapping}, wanted)
        assert not reported and counts[name] == 1, row


NEUTRAL = [
    PAIR | {"images": [], "history": None, "label": True, "weight": 1.0, "train": True},
    CHAT | {"label": 3, "system": "", "weight": "1"},
    CHAT | {"loss_mask": [1, 1], "response_mask": "[1, 1]", "attention_mask": [0, 1], "labels": ["a"], "mask": 1},
    CHAT | {"thinking_budget": 5, "thinking": "Hm", "model_identity": "You"},  # the template does not read them
    CHAT | {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": False}},
    {"text": "a", "enable_thinking": False},
    CHAT | {"documents": "[]", "tools": "[]", "functions": "{}", "images": "null", "system_prompt": " "},
    {"messages": [SYSTEM, USER, ANSWER], "system": SYSTEM["content"]},
    {"prompt": "Once upon a time. Who?", "completion": "b", "context": "Once upon a time."},
    {"text": "a", "image_url": "a.png", "label": -1, "documents": ["a"], "context": "b"},
    PAIR | {"image_id": 3, "reasoning": "on", "cot": "Hm"},
    answer(reasoning="Hm", reasoning_details=[{"text": "Hm"}]),
    answer(content="<think>Hm</think>Hello", thought="Hm"),
    answer(reasoning_tokens=5, stop_reason="end", finish_reason="stop", file=None, image_url="", channel="final"),
    answer(tool_calls=[CALL | {"index": 0, "type": "tool_call", "id": "a", "status": "completed", "result": None}]),
    answer(tool_calls=[CALL], additional_kwargs={"tool_calls": [CALL]}),
    {"messages": [USER | {"loss_mask": 0, "masked": True, "mask": 1, "thought": "Hm", "from": "human"}, ANSWER]},
    {"messages": [USER | {"from": "Ann", "value": 3}, ANSWER | {"value": ANSWER["content"], "loss_mask": 1}]},
    {"text": "a", "label": 0, "role": None},
    {"input_ids": [1, 2], "attention_mask": [1, 1], "position_ids": [0, 1], "label": 0},
    IDS | {"attention_mask": "[1, 1]", "seq_lengths": [2], "cu_seqlens": [0, 2], "segment_ids": [3, 3]},
    {"messages": [USER | {"loss": False, "loss_weight": 0}, ANSWER | {"loss": True, "loss_weight": 1.0}]},
    answer(train=False, weight=0, name="Ann", reasoning_content="hm"),
    # What is given twice, and what tables fill with nulls.
    {"messages": [USER, ANSWER, RESULT | {"tool_name": "add", "call_id": "1"}, ANSWER]},
    answer(content=[{"type": "text", "text": "a", "image_url": {"url": None}}], tool_calls=[CALL | {"n": {"a": ""}}]),
    CHAT | {"images": [None], "video": {"bytes": None, "path": None}},
    ALPACA | {"history": [["a", "b"]], "system": "Be kind"},
]
NEUTRAL_OF_PAIRS = [
    {"prompt": "Once upon a time. Who?", **PREFERRED, "context": "Once upon a time."},
    {"prompt": "a", **PREFERRED, "score_chosen": 1, "source": "web"},
    {"prompt": [SYSTEM, USER], "chosen": [ANSWER], "rejected": [ANSWER], "system_prompt": SYSTEM["content"]},
    {"instruction": "a", "input": "b", **PREFERRED},
]


@pytest.mark.parametrize(("rows", "wanted"), [(NEUTRAL, "answers"), (NEUTRAL_OF_PAIRS, "pairs")])
def test_what_changes_nothing_is_not_refused(rows, wanted):
    for row in rows:
        assert looked(row, {"text": "text"} if "text" in row else {}, wanted)[0] == "", row


@pytest.mark.parametrize("column", ["system", "system_prompt"])
def test_of_two_system_prompts_the_message_says_so(column):
    row = {"messages": [SYSTEM, USER, ANSWER], column: "Be brief"}
    assert "a system prompt, and the messages begin with another one" in looked(row)[0]


def test_json_in_a_string_that_is_no_message_has_no_keys_that_could_be_read():
    records = json.dumps([{"id": 1, "label": False, "image": "a.png"}])
    assert looked({"prompt": "a", "completion": records}) == looked({"instruction": "a", "output": records}) == ("", {})
    messages = json.dumps([USER | {"image": "a.png"}])
    assert looked({"instruction": messages, "output": "b"})[0].startswith("instruction.image: ")


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
