"""Unused columns and keys: counted where they do no harm, refused where they would change the training."""

import json

import pytest
from data_helpers import ANSWER, USER, open_all, unused_of, write

from kit.data.kinds.kinds import KINDS
from kit.system.errors import UserError

PAIR = {"prompt": "a", "completion": "b"}
CHAT = {"messages": [USER, ANSWER]}
ALPACA = {"instruction": "a", "output": "b"}
IDS = {"input_ids": [1, 2]}
CALL = {"name": "add", "arguments": {"a": 1}}
PREFERRED = {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]}


def looked(row, mapping=None, wanted="answers"):
    """The problems of a row, as one string, and what is counted of it."""
    mapping = mapping or {}
    unused = unused_of(row, mapping, KINDS[wanted])
    reported = "\n".join(map(str, unused.check(row)))
    return reported, dict(unused.counts)


def answer(**keys):
    return {"messages": [USER, ANSWER | keys]}


# Rows, and the column or key in each that must not be ignored unseen.
HARMFUL = [
    (PAIR | {"video": ["a.mp4"]}, "video"),
    (PAIR | {"label": False}, "label"),
    (ALPACA | {"weight": 0.5}, "weight"),
    (CHAT | {"loss_mask": "[0, 1]"}, "loss_mask"),
    (IDS | {"attention_mask": [1, 0]}, "attention_mask"),
    (IDS | {"position_ids": [0, 0]}, "position_ids"),
    ({"text": "a", "role": "prompter"}, "role"),
    ({"text": "a", "file_name": "b/A.JPG"}, "file_name"),
    ({"images": "a.jpg", "output": "two", "question": "how many?"}, "question"),
    (answer(loss_weight=0.5), "messages.loss_weight"),
    (answer(masked=True), "messages.masked"),
    (answer(thoughts="Hm"), "messages.thoughts"),
    (answer(toolCalls=[CALL]), "messages.toolCalls"),
    ({"messages": [USER | {"loss": True}, ANSWER]}, "messages.loss"),
]
OF_PAIRS = [
    (PREFERRED | {"rejected": ANSWER | {"loss": 0}}, "rejected.loss"),
]


def test_values_that_would_change_the_training_are_refused_unless_ignored_on_purpose():
    for row, name, wanted in [*((*case, "answers") for case in HARMFUL), *((*case, "preference") for case in OF_PAIRS)]:
        reported, counts = looked(row, wanted=wanted)
        assert reported.startswith(f"{name}: ") and counts[name] == 1, (row, reported)
        assert f"to ignore it, add {name}=ignore to --dataset_columns" in reported
        assert name != "file_name" or f"--dataset_columns {name}=images (or audio)" in reported
        reported, counts = looked(row, {name: "ignore"}, wanted)
        assert not reported and counts[name] == 1, row


def test_an_answer_or_a_prompt_that_the_first_row_lacks_is_not_ignored_unseen():
    for first, name, wanted in (
        ({"prompt": [USER]}, "completion", "prompts"),
        ({"instruction": "a"}, "output", "prompts"),
        ({"chosen": "a", "rejected": "b"}, "prompt", "ranking"),
    ):
        kind = KINDS[wanted]
        (problem,) = unused_of(first, {}, kind).check(first | {name: "b"})
        assert str(problem).startswith(f"{name}: a column that the first row lacks"), problem
        assert not unused_of(first, {name: "ignore"}, kind).check(first | {name: "b"})
    renamed = {"question": "a", "chosen": "b", "rejected": "c", "prompt": "d"}
    assert looked(renamed, {"question": "prompt"}, "preference") == ("", {"prompt": 1})


def test_what_changes_nothing_is_not_refused():
    for row in (
        PAIR | {"images": [], "history": None, "label": True, "weight": 1.0, "train": True, "file_name": "a.py"},
        CHAT | {"label": 3, "system": "", "weight": "1", "loss_mask": [1, 1], "labels": ["a"], "documents": "[]"},
        CHAT | {"images": [None], "video": {"bytes": None, "path": None}, "tools": "[]", "input": "a"},
        {"text": "a", "label": 0, "context": "b", "role": None, "reasoning_content": "Hm"},
        IDS | {"attention_mask": "[1, 1]", "label": 0},
        answer(reasoning="Hm", reasoning_details=[{"text": "Hm"}], stop_reason="end", image_url=""),
        answer(loss=True, loss_mask=1, train=False, weight=0, name="Ann"),
        ALPACA | {"history": [["a", "b"]], "system": "Be kind", "question": "a"},
    ):
        assert looked(row)[0] == "", row


def test_what_is_not_used_is_counted_once_a_row():
    row = {"messages": [USER | {"id": 1}, ANSWER | {"id": 2, "model": None}], "source": "web", "url": "", "score": 0}
    assert looked(row)[1] == {"source": 1, "score": 1, "messages.id": 1}
    assert looked(row | {"messages": json.dumps(row["messages"])})[1] == looked(row)[1]  # as in a table of cells


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
    # chatml writes no names, so both are trained on, but a run with one is not a run with the other
    assert open_all(tokenizer, **flags, dataset_columns="messages.name=ignore").fingerprint != plain.fingerprint
