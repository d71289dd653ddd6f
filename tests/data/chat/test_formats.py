"""Rows as others write them: read as what they mean, or reported with the field that is wrong."""

import json
import math
import re
from dataclasses import replace

import yaml
from data_helpers import ANSWER, SYSTEM, USER, converted, made, problems_of, sample_of
from helpers import ROOT

from kit.config.dataset_entry import DatasetEntry
from kit.data.chat.media_parts import MARKS
from kit.data.kinds.classification import ClassificationRows, label_names
from kit.data.kinds.columns import choose_fields
from kit.data.kinds.kinds import KINDS

IMAGE = MARKS["image"]

ADD = {"type": "function", "function": {"name": "add"}}


def test_what_is_in_our_form_stays_as_it_is():
    for sample in (
        {"text": "a"},
        {"prompt": "a", "completion": "b"},
        {"prompt": [SYSTEM, USER], "completion": [ANSWER]},
        {"messages": [SYSTEM, USER, ANSWER, USER, ANSWER]},
        {"messages": [ANSWER]},  # a template may refuse that
        {"messages": [USER, ANSWER, {"role": "tool", "content": ""}, {"role": "assistant", "content": "ü 你好"}]},
        {"messages": [USER, ANSWER | {"reasoning_content": "hm", "weight": 0.5}], "tools": [ADD]},
        {"messages": [USER, ANSWER], "chat_template_kwargs": {"a": 1}},
        {"input_ids": [3, 0, 5]},
        {"input_ids": [3, 0, 5], "labels": [-100, 0, 5]},
    ):
        assert sample_of({"source": "web", **sample}) == sample


def test_an_image_caption_becomes_messages():
    expected = {"messages": [{"role": "user", "content": IMAGE}, ANSWER], "media": [("image", "a.png")]}
    assert sample_of({"images": "a.png", "output": "Hello"}) == expected
    assert problems_of({"images": "", "output": "Hello"}) == "images: none; expected an image, which output describes"


def turns(*texts):
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]


def test_alpaca_becomes_messages():
    row = {"instruction": "Hi", "output": "Hello"}
    assert sample_of(row | {"input": " ", "system": "", "history": []}) == {"messages": [USER, ANSWER]}
    question = {"role": "user", "content": "Hi\n\nAnn"}
    assert sample_of(row | {"input": "Ann", "system": "Be kind"}) == {"messages": [SYSTEM, question, ANSWER]}
    history = [["1?", "one"], ["2?", "two"]]
    for given in (history, json.dumps(history)):
        assert sample_of(row | {"history": given}) == {"messages": [*turns("1?", "one", "2?", "two"), USER, ANSWER]}
    assert problems_of(row | {"input": 0}) == "input: a number; expected a string"
    reasoned = sample_of(row | {"reasoning_content": "A guest"})
    assert reasoned == {"messages": [USER, ANSWER | {"reasoning_content": "A guest"}]}


def test_a_prompt_format_words_the_question_of_answers_and_of_pairs():
    format = "Task: {instruction}[ with {input}]"
    for row, question in (
        ({"instruction": "a", "input": "b"}, "Task: a with b"),
        ({"instruction": "a", "input": " "}, "Task: a"),
    ):
        for answers, wanted in (({"output": "c"}, "answers"), ({"chosen": "c", "rejected": "d"}, "preference")):
            fields = choose_fields(dict.fromkeys([*row, *answers]), {}, "train.jsonl", kind=KINDS[wanted])
            sample = converted(row | answers, fields, format, kind=KINDS[wanted])
            assert sample.get("messages", sample.get("prompt"))[0] == {"role": "user", "content": question}
    row = {"instruction": "a", "input": "b", "output": "c"}
    (problem,) = converted(row, {name: name for name in row}, "{instruction}")
    assert problem.where == "input"


def test_a_first_system_turn_of_sharegpt_may_be_blank_or_repeat_the_column():
    for first, column in ((" ", None), (" ", "Be kind"), ("Be kind\n", "Be kind")):
        said = [{"from": who, "value": text} for who, text in (("system", first), ("human", "Hi"), ("gpt", "Hello"))]
        expected = [USER, ANSWER] if column is None else [SYSTEM, USER, ANSWER]
        assert sample_of({"conversations": said, "system": column}) == {"messages": expected}
    message = problems_of({"conversations": said, "system": "Be brief"})
    assert message.startswith("system: another one than the system message of the conversation")


def test_a_blank_system_message_of_openai_is_kept_for_the_template():
    blank = SYSTEM | {"content": ""}
    assert sample_of({"messages": [blank, USER, ANSWER]}) == {"messages": [blank, USER, ANSWER]}


def test_an_answer_may_stand_alone_in_a_list_and_a_prompt_may_have_a_system_message():
    assert sample_of({"instruction": "Hi", "output": ["Hello"]}) == {"messages": [USER, ANSWER]}
    assert problems_of({"instruction": "Hi", "output": ["Hello", "Hi"]}) == "output: a list; expected a string"
    row = {"prompt": [USER], "completion": ["Hello"], "system": "Be kind"}
    assert sample_of(row) == {"prompt": [SYSTEM, USER], "completion": [ANSWER]}
    assert problems_of({"prompt": "Hi", "completion": "Hello", "system": "Be kind"}).startswith(
        "system: given with plain texts"
    )


def test_a_key_of_an_object_may_be_mapped_as_a_column():
    row = {"prompt": [USER], "reward_model": {"ground_truth": "Hello", "style": "rule"}}
    mapping = {"completion": "reward_model.ground_truth"}
    assert sample_of(row, **mapping) == {"prompt": [USER], "completion": [ANSWER]}
    fields = choose_fields(row, {theirs: ours for ours, theirs in mapping.items()}, "train.jsonl")
    (problem,) = converted({"prompt": [USER], "reward_model": {"style": "rule"}}, fields)
    assert str(problem).startswith(": no 'reward_model.ground_truth' (it has prompt, reward_model.style)")
    assert sample_of({"prompt": [USER], "a.b": "Hello"}, completion="a.b")["completion"] == [ANSWER]


def test_lists_of_messages_may_be_json_strings_and_other_texts_stay_texts():
    for row in ({"messages": [USER, ANSWER]}, {"prompt": [USER], "completion": [ANSWER]}):
        assert sample_of({name: json.dumps(value) for name, value in row.items()}) == row
        twice = {name: re.sub('"content": ', r'"content": "lost", "content": ', json.dumps(row[name])) for name in row}
        assert "an object has the key 'content' twice" in problems_of(twice)
    assert sample_of({"prompt": [USER], "completion": "Hello"}) == {"prompt": [USER], "completion": [ANSWER]}
    texts = {"prompt": json.dumps([{"a": "user"}]), "completion": "[1, 2]"}
    assert sample_of(texts) == texts


def test_a_bad_row_is_reported_with_its_field():
    for row, message in (
        ({"text": 3}, "text: a number; expected a string"),
        ({"prompt": [USER], "completion": [SYSTEM, ANSWER]}, "completion[0].role: a second system message"),
        ({"instruction": "a", "output": "b", "input": "\u200b"}, "input: only invisible characters (U+200B)"),
        ({"instruction": "a", "output": "b", "history": [["1?"]]}, "history: a list; expected a list of [question,"),
        ({"input_ids": [1, -1]}, "input_ids[1]: -1; expected a whole number of at least 0"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels: 1 of them; expected a list of 2, as many as input_ids"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "labels[0]: 2; expected -100, or 1 as in input_ids"),
    ):
        assert message in problems_of(row)


def read_as(wanted, **row):
    sample = made(row, kind=KINDS[wanted])
    return str(sample[0]) if isinstance(sample, list) else sample


def test_a_list_of_labels_names_each_once_and_a_multi_hot_list_is_refused():
    for label in ([1, 0, 0], [0.0, 1.0], [True, False], "[1, 0, 1]", ["a", "a"]):
        problem = ClassificationRows().check(read_as("classification", text="t", label=label))
        assert "expected the names or the numbers of its labels, each once\n    -> of a multi-hot list" in str(problem)
    for label, names in (("[PER]", ["[PER]"]), ('["a", "[b]"]', ["a", "[b]"]), ([2, 0], ["2", "0"]), ([], [])):
        assert label_names(label)[0] == names
    problem = ClassificationRows().check(read_as("classification", text="t", label="['a', 'b']"))
    assert str(problem).startswith("label: a string that is not JSON")


def test_numbers_of_regression_are_finite_and_as_many_in_each_row():
    kind = ClassificationRows(labels=("0",), problem_type="regression")
    for label in (True, "good", None, math.nan, "inf", 1e39, 10**400, [True], {}):
        assert str(kind.check({"label": label})).endswith("; expected a number"), label
    for label in ([], "[]"):  # also of the first row, which says how many there are
        assert "an empty list" in str(replace(kind, labels=()).check({"label": label})), label
    for label in ([1, 2], "[0.5, 2]"):
        problem = kind.check({"label": label})
        assert problem and problem.expected == "1, as other rows have" and not problem.fix, label
    for label, numbers in ((-2, [-2.0]), ("0.25", [0.25]), ([1e-3], [1e-3])):  # a cell of a table is a string
        assert kind.check({"label": label}) is None and kind.values({"label": label}, ()) == numbers


def test_negatives_are_a_text_or_a_list_of_texts():
    for given, texts in (
        ("[Music] no", ["[Music] no"]),
        ('["no", "never"]', ["no", "never"]),
        (["[1] no"], ["[1] no"]),
    ):
        assert read_as("contrastive", anchor="a", positive="b", negative=given)["plain"][2:] == [
            [each] for each in texts
        ]
        pairs = read_as("ranking", query="a", positive="b", negative=given)["plain"]
        assert pairs == [["a", each] for each in ("b", *texts)]
    assert read_as("ranking", query="a", positive="b", negative=[]) == "negative: none; expected at least one"


def test_a_row_of_another_format_than_the_first_is_reported_with_its_columns():
    fields = choose_fields(dict.fromkeys(["prompt", "completion", "tools"]), {}, "train.jsonl")
    (problem,) = converted({"text": "a", "prompt": "b"}, fields)
    assert str(problem) == ": no 'completion' (it has text, prompt); expected prompt and completion in every row"
    assert converted({"prompt": "a", "completion": "b"}, fields) == {"prompt": "a", "completion": "b"}
    fields = choose_fields(
        dict.fromkeys(["input_ids", "labels"]), {}, "train.jsonl"
    )  # training on all of it is not meant
    (problem,) = converted({"input_ids": [1]}, fields)
    assert "no 'labels'" in str(problem)
    fields = choose_fields({"messages": []}, {}, "train.jsonl")  # an optional column that only later rows have
    assert converted({"messages": [USER, ANSWER], "tools": [ADD]}, fields)["tools"] == [ADD]


def documented_formats():
    """The table of formats in docs/data.md: of each, its columns and the examples of its rows."""
    section = (ROOT / "docs/data.md").read_text().split("## Formats\n")[1].split("\n## ")[0]
    documented = []
    for columns, example in re.findall(r"^\|[^|]*\|(.*?)\| `(\{.*\})` \|$", section, re.MULTILINE):
        if columns.strip():
            documented.append((tuple(re.findall(r"`(\w+)`", columns)), []))
        documented[-1][1].append(example)
    return documented


def test_the_page_on_data_lists_the_formats_in_order_of_precedence_and_its_examples_are_read_so():
    kinds = {}  # of formats that several read, the first
    documented = [columns for columns, _ in documented_formats()]
    for kind in KINDS.values():
        read = [format.columns for format in kind.formats]
        assert [columns for columns in documented if columns in read] == read
        kinds = dict.fromkeys(read, kind) | kinds
    assert sorted(documented) == sorted(kinds)
    page = (ROOT / "docs/data.md").read_text()
    for format in (format for kind in KINDS.values() for format in kind.formats):
        for column in format.optional + format.all_or_none:
            assert f"`{column}`" in page or f'"{column}":' in page, column
    for columns, examples in documented_formats():
        for example in examples:
            row = json.loads(example.replace("[...]", json.dumps([USER, ANSWER])).replace("{...}", "{}"))
            fields = choose_fields(row, {}, "train.jsonl", kind=kinds[columns])
            sample = converted(row, fields, kind=kinds[columns])
            assert isinstance(sample, dict), f"{example}: {sample}"
            assert kinds[columns].format_of(fields).columns == columns


def test_the_example_of_tool_calling_in_the_docs_is_read():
    (example,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs/chat-templates.md").read_text(), re.DOTALL)
    row = json.loads(example)
    sample = converted(row, choose_fields(row, {}, "train.jsonl"))
    assert sample["messages"][1]["tool_calls"][0]["function"]["name"] == sample["tools"][0]["function"]["name"] == "add"


def test_the_lists_of_data_sets_in_the_docs_are_read():
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/data.md").read_text(), re.DOTALL)
    entries = [entry for block in blocks for entry in yaml.safe_load(block)["dataset"]]
    assert len([DatasetEntry.model_validate(entry) for entry in entries]) == 3
