"""What a row holds besides its format: counted where it does no harm, refused where it would change what is learned."""

import json
import re

import pytest
from data_helpers import ANSWER, SYSTEM, USER, open_all, write

from kit.data.chat.columns import choose_fields
from kit.data.chat.formats import to_sample
from kit.data.chat.messages import ROLES
from kit.data.chat.unused import Unused
from kit.errors import UserError

PAIR = {"prompt": "a", "completion": "b"}
CHAT = {"messages": [USER, ANSWER]}
ALPACA = {"instruction": "a", "output": "b"}
IDS = {"input_ids": [1, 2]}
CALL = {"name": "add", "arguments": {"a": 1}}
RESULT = {"role": "tool", "content": "3", "name": "add", "tool_call_id": "1"}


# A flag that uses a column, and does not ignore it.
USING = r"(?<!to ignore it, )(?<!--objective kto )--dataset_columns (\w+=\w+(?:,\w+=\w+)*)"
TEMPLATE = "{{ messages if enable_thinking or thinking else reasoning_effort }}"


def looked(row, mapping=None):
    """The problems of a row, as one string, and what is counted of it."""
    mapping = mapping or {}
    fields = choose_fields(list(row), mapping, "train.jsonl")
    unused = Unused(fields, [k for k, v in mapping.items() if v == "ignore"], TEMPLATE)
    reported = "\n".join(map(str, unused.check(row)))
    return reported, dict(unused.counts)


def mapping_of_text(row):
    """What says that ``row`` is read as plain text, where that is not clear."""
    return {"text": "text"} if "text" in row else {}


def answer(**keys):
    return {"messages": [USER, ANSWER | keys]}


HARMFUL = [
    (PAIR | {"images": ["a.png"]}, "images", "media, and only text is learned from"),
    ({"text": "a", "image": {"bytes": "x"}}, "image", "media"),
    (answer(images=["a.png"]), "messages.images", "media"),
    (CHAT | {"history": [["a", "b"]]}, "history", "earlier turns, which only instruction and output can have"),
    (PAIR | {"history": [["a", "b"]]}, "history", "--dataset_columns prompt=instruction,completion=output"),
    (
        {"prompt": [USER], "completion": [ANSWER], "system": "Be kind"},
        "system",
        "--dataset_columns prompt=instruction,completion=output reads a chat with it",
    ),
    (PAIR | {"label": False}, "label", "false: an answer marked as bad would be learned"),
    (CHAT | {"label": "False"}, "label", "an answer marked as bad"),
    (PAIR | {"kto_tag": 0}, "kto_tag", "0: an answer marked as bad"),
    (ALPACA | {"weight": 0.5}, "weight", "a weight of the row (0.5)"),
    (CHAT | {"loss_weight": "2"}, "loss_weight", "a weight of the row (2)"),
    *[(CHAT | {"train": value}, "train", "a row that is not to be learned from") for value in (False, 0, "0", "no")],
    (PAIR | {"training": False}, "training", "false: a row that is not to be learned from"),
    *[(PAIR | {"label": value}, "label", "an answer marked as bad would be learned") for value in (-1, "-1", -0.5)],
    (CHAT | {"loss_multiplier": 0.0}, "loss_multiplier", "a weight of the row (0.0)"),
    *[
        (row | {name: value}, name, "only whole messages can be chosen")
        for row in (CHAT, PAIR, {"text": "a"})
        for name, value in (("loss_mask", [0, 1]), ("response_mask", "[0, 1]"), ("loss_mask", 0), ("mask", "User"))
    ],
    (PAIR | {"labels": [-100, 5]}, "labels", "labels of tokens, of which -100 is not to be learned"),
    (CHAT | IDS | {"labels": [-100, 2]}, "labels", "--dataset_columns input_ids=input_ids,labels=labels reads these"),
    (CHAT | {"documents": [{"title": "a"}]}, "documents", "write them into the messages"),
    (CHAT | {"enable_thinking": False}, "enable_thinking", "a value of a variable of the chat template (false)"),
    (PAIR | {"reasoning_effort": "low"}, "reasoning_effort", "write it into a column chat_template_kwargs"),
    (CHAT | {"thinking": True}, "thinking", "a value of a variable of the chat template (true)"),
    (PAIR | {"context": "Once"}, "context", "--dataset_columns prompt=instruction,completion=output,context=input"),
    (PAIR | {"input": "2, 2"}, "input", "--dataset_columns prompt=instruction,completion=output reads a chat with it"),
    (ALPACA | {"context": "Once"}, "context", "--dataset_columns context=input"),
    (PAIR | {"chat_history": [["a", "b"]]}, "chat_history", "completion=output,chat_history=history reads a chat"),
    ({"text": "a", "history": [["a", "b"]]}, "history", "earlier turns"),
    (PAIR | {"tool_calls": [CALL]}, "tool_calls", "calls beside prompt and completion"),
    (PAIR | {"reasoning_content": "Hm"}, "reasoning_content", "completion=output reads a chat with it"),
    (CHAT | {"reasoning_content": "Hm"}, "reasoning_content", "the reasoning of an answer beside messages"),
    ({"instruction": "a", "tool_calls": [CALL | {"result": 4}]}, "tool_calls.result", "a key of a call"),
    ({"text": "a", "system": "Be kind"}, "system", "a system prompt beside text"),
    ({"text": "a", "tools": [{"name": "add"}]}, "tools", "tools of the assistant"),
    (PAIR | {"image_url": "a.png"}, "image_url", "media"),
    (answer(train_detail=[{"begin_offset": 0}]), "messages.train_detail", "only whole messages can be chosen"),
    (answer(loss_weight=0.5), "messages.loss_weight", "call it weight, on assistant turns"),
    (answer(loss=False), "messages.loss", "false: how much is learned from a message\n    -> call it train"),
    (answer(training=False), "messages.training", "call it train"),
    (answer(loss_mask=0), "messages.loss_mask", "0: how much is learned from a message\n    -> call it weight"),
    (answer(loss_mask=[0, 1]), "messages.loss_mask", "only whole messages can be chosen"),
    (answer(step_loss_mask=0), "messages.step_loss_mask", "call it weight, on assistant turns"),
    (answer(trainable=False), "messages.trainable", "call it train"),
    (answer(masked=True), "messages.masked", 'write "train": false, on assistant turns'),
    *[(answer(mask=value), "messages.mask", "how much is learned") for value in (1, 0, True)],  # it may mean either
    (answer(label=-1), "messages.label", "-1: an answer marked as bad"),
    *[
        (answer(**{name: "Hm"}), f"messages.{name}", "call it reasoning_content, as a string")
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
    (answer(reasoning_details=[{"text": "Hm"}]), "messages.reasoning_details", "the reasoning of an answer"),
    *[
        ({"messages": [USER | {name: ["a.png"]}, ANSWER]}, f"messages.{name}", "media, and only text is learned from")
        for name in ("image_url", "video_path", "input_audio")
    ],
    *[
        ({"messages": [USER | {name: "a.py"}, ANSWER]}, f"messages.{name}", "a file beside the text (a.py)")
        for name in ("file", "files", "attachments")
    ],
    (answer(content=[{"type": "text", "text": "a", "image": "x"}]), "messages.content.image", "media"),
    (answer(toolCalls=[CALL]), "messages.toolCalls", "calls are tool_calls of an assistant turn"),
    (answer(additional_kwargs={"tool_calls": [CALL]}), "messages.additional_kwargs", "it holds tool_calls"),
    (answer(channel="analysis"), "messages.channel", "analysis: a thought, or a call, would be learned"),
    (answer(recipient="functions.add"), "messages.recipient", "a call would be learned as an answer"),
    (
        {"messages": [{"role": "tool", "content": "2", "tool_use_id": "c1"}, ANSWER]},
        "messages.tool_use_id",
        "call it tool_call_id",
    ),
    (answer(value="Bye"), "messages.value", "differs from content: only one of them can be meant"),
    ({"messages": [USER | {"from": "gpt"}, ANSWER]}, "messages.from", "differs from role"),
    (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "content": "c"}]},
        "conversations.content",
        "differs from value",
    ),
    *[
        (answer(tool_calls=calls), "messages.tool_calls.result", "a key of a call that nothing reads (4)")
        for calls in ([CALL | {"result": 4}], [{"function": CALL | {"result": 4}}], [{"function": CALL, "result": 4}])
    ],
    (
        answer(tool_calls=[{"function": {"name": "add"}, "arguments": {"a": 1}}]),
        "messages.tool_calls.arguments",
        "call",
    ),
    (answer(function_call=json.dumps(CALL | {"kwargs": {"b": 2}})), "messages.function_call.kwargs", "arguments"),
    (
        {"conversations": [{"from": "function_call", "value": json.dumps(CALL | {"params": {"b": 2}})}]},
        "conversations.value.params",
        "its arguments, called arguments, parameters, args or input",
    ),
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
    *[
        (IDS | {"attention_mask": mask}, "attention_mask", "masks tokens, which would be learned")
        for mask in ("[1, 0]", "1 0", [1, 2], [1.0, 0.0])  # as in a table of cells; the number of a packed sample
    ],
    ({"input_ids": [1, 2], "position_ids": [0, 0]}, "position_ids", "packed samples would see each other"),
    (IDS | {"seq_lengths": [1, 1]}, "seq_lengths", "several samples in a row"),
    (IDS | {"cu_seqlens": [0, 1, 2]}, "cu_seqlens", "several samples in a row"),
    (IDS | {"segment_ids": [0, 1]}, "segment_ids", "several samples in a row"),
]


@pytest.mark.parametrize(("row", "name", "message"), HARMFUL)
def test_what_would_change_what_is_learned_is_refused_unless_it_is_ignored_on_purpose(row, name, message):
    reported, counts = looked(row)
    assert reported.startswith(f"{name}: ") and message in reported and counts[name] == 1
    assert f"to ignore it, --dataset_columns {name}=ignore" in reported
    reported, counts = looked(row, {name: "ignore", **({"text": "text"} if "text" in row else {})})
    assert not reported and counts[name] == 1


@pytest.mark.parametrize(
    "row",
    [
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
        answer(
            content=[{"type": "text", "text": "a", "image_url": {"url": None}}], tool_calls=[CALL | {"n": {"a": ""}}]
        ),
        CHAT | {"images": [None], "video": {"bytes": None, "path": None}},
        ALPACA | {"history": [["a", "b"]], "system": "Be kind"},
    ],
)
def test_what_changes_nothing_is_not_refused(row):
    assert looked(row)[0] == ""


@pytest.mark.parametrize(("row", "name"), [case[:2] for case in HARMFUL])
def test_a_flag_that_is_named_reads_the_column(row, name):
    for flag in re.findall(USING, looked(row, mapping_of_text(row))[0]):
        mapping = dict(pair.split("=") for pair in flag.split(","))
        fields = choose_fields(list(row), mapping, "train.jsonl")
        assert isinstance(to_sample(row, fields), dict)
        assert name not in [problem.where for problem in Unused(fields, ()).check(row)]


@pytest.mark.parametrize("column", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "messages",
    [
        {"messages": [{"role": "system", "content": "Be kind"}, USER, ANSWER]},
        {"conversations": [{"from": "system", "value": "Be kind"}, {"from": "gpt", "value": "Hello"}]},
    ],
)
def test_for_a_second_system_prompt_no_flag_is_named(messages, column):
    reported = looked(messages | {column: "Be brief"})[0]
    assert not re.search(USING, reported)
    if "messages" in messages or column != "system":
        assert f"{column}: a system prompt, and the messages begin with another one" in reported
    assert looked(messages | {column: "Be kind"})[0] == ""


def test_json_in_a_string_that_is_no_message_has_no_keys_that_could_be_read():
    records = json.dumps([{"id": 1, "label": False, "image": "a.png"}])
    assert looked({"prompt": "a", "completion": records}) == looked({"instruction": "a", "output": records}) == ("", {})
    messages = json.dumps([USER | {"image": "a.png"}])
    assert "instruction.image: media" in looked({"instruction": messages, "output": "b"})[0]


@pytest.mark.parametrize(
    "row",
    [row for row, name, _ in HARMFUL if re.search(USING, looked(row)[0])],
)
def test_a_mapping_that_a_message_names_reads_what_would_be_lost(row):
    """It is tried: the row is no longer refused, and the sample holds the value."""
    reported, _ = looked(row)
    name, _, rest = reported.partition(":")
    flag = re.search(USING, rest)[1]
    mapping = dict(pair.split("=") for pair in flag.split(","))
    assert not looked(row, mapping)[0]
    sample = to_sample(row, choose_fields(list(row), mapping, "train.jsonl"))
    value = row[name][0] if isinstance(row[name], list) else row[name]
    value = value[0] if isinstance(value, list) else value.get("name") if isinstance(value, dict) else value
    assert str(value) in str(sample)


@pytest.mark.parametrize(
    ("row", "flag"),
    [
        (PAIR | {"label": False}, ""),
        (PAIR | {"kto_tag": False}, "kto_tag=label"),
        (CHAT | {"label": "False", "tools": None}, "messages=completion"),
        (ALPACA | {"label": False, "input": "c", "system": "d", "history": None}, "output=completion"),
        ({"conversations": CHAT["messages"], "kto_tag": False, "tools": []}, "kto_tag=label,conversations=completion"),
    ],
)
def test_for_an_answer_marked_as_bad_the_objective_that_learns_from_it_is_named(row, flag):
    text = f"--objective kto --dataset_columns {flag}" if flag else "--objective kto"
    reported = looked(row)[0]
    assert f"-> {text} learns from good and bad answers; or remove such rows" in reported
    mapping = dict(pair.split("=") for pair in flag.split(",")) if flag else {}
    fields = choose_fields(list(row), mapping, "train.jsonl", rows=[row], wanted="rated")
    assert to_sample(row, fields)["label"] is False
    assert Unused(fields, ()).check(row) == []


def test_of_columns_that_are_mapped_the_objective_gets_the_whole_mapping():
    reported = looked(PAIR | {"label": False}, {"prompt": "instruction", "completion": "output"})[0]
    flag = "--dataset_columns completion=completion,prompt=instruction"
    assert f"-> --objective kto {flag} learns from good and bad answers" in reported


@pytest.mark.parametrize(
    "row",
    [
        PAIR | {"label": 0},  # no objective takes a number for a label
        ALPACA | {"label": False, "history": [["a", "b"]]},
        {"alternating_turns": ["a", "b"], "label": False},
    ],
)
def test_for_an_answer_marked_as_bad_no_objective_is_named_that_would_refuse_it(row):
    reported = looked(row)[0]
    assert "-> remove such rows, which leaves the good answers" in reported and "--objective" not in reported
    assert 'write "train": false; or remove such rows' in looked(answer(label=False))[0]


PREFERRED = {"chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("row", "reported"),
    [
        (
            {"prompt": "a", **PREFERRED, "context": "d"},
            "--dataset_columns prompt=instruction,context=input reads a chat",
        ),
        ({"prompt": "a", **PREFERRED, "history": [["a", "b"]]}, "earlier turns, which only instruction and output"),
        (
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER], "functions": [{"name": "add"}]},
            "functions=tools",
        ),
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER], "system_prompt": "d"}, "system_prompt=system"),
        (
            {"prompt": [SYSTEM, USER], "chosen": [ANSWER], "rejected": [ANSWER], "system_prompt": "Be brief"},
            "another one",
        ),
        ({"prompt": "a", **PREFERRED, "images": ["a.png"]}, "images: media"),
        ({"prompt": [USER], "chosen": [ANSWER | {"image": "a"}], "rejected": [ANSWER]}, "chosen.image: media"),
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER | {"loss": 0}]}, "rejected.loss: 0: how much"),
        ({"prompt": [USER | {"image": "a"}], "chosen": [ANSWER], "rejected": [ANSWER]}, "prompt.image: media"),
    ],
)
def test_what_would_be_lost_of_a_pair_is_reported(row, reported):
    fields = choose_fields(list(row), {}, "train.jsonl", wanted="pairs")
    message = "\n".join(map(str, Unused(fields, ()).check(row)))
    assert reported in message
    for flag in re.findall(USING, message):
        mapping = dict(pair.split("=") for pair in flag.split(","))
        mapped = choose_fields(list(row), mapping, "train.jsonl", wanted="pairs")
        assert isinstance(to_sample(row, mapped), dict) and not Unused(mapped, ()).check(row)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Once upon a time. Who?", **PREFERRED, "context": "Once upon a time."},
        {"prompt": "a", **PREFERRED, "score_chosen": 1, "source": "web"},
        {"prompt": [SYSTEM, USER], "chosen": [ANSWER], "rejected": [ANSWER], "system_prompt": SYSTEM["content"]},
        {"instruction": "a", "input": "b", **PREFERRED},
    ],
)
def test_what_changes_nothing_of_a_pair_is_not_refused(row):
    assert not Unused(choose_fields(list(row), {}, "train.jsonl", wanted="pairs"), ()).check(row)


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
