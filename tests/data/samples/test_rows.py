"""Rows as samples: what becomes of those that are too long, or teach nothing, and which weights reach them."""

import pytest
from data_helpers import CALL, WEATHER, byte_level_tokenizer, chat, open_all, pairs, template_of, write, write_any

from kit.rollouts.tools.tool_turns import ToolTurns
from kit.system.errors import UserError

LONG_ROWS = [
    {"prompt": "a b ", "completion": "c"},  # fits
    {"prompt": "a b ", "completion": "c " * 50},  # part of its answer fits
    {"prompt": "a " * 50, "completion": "c"},  # only its prompt would be left
]


def pairs_of(train):
    """Of each sample its ids with their weights."""
    return [list(zip(ids.tolist(), weights.tolist(), strict=True)) for ids, weights in train]


@pytest.mark.parametrize("with_bos", [False, True])
def test_of_what_is_too_long_what_is_asked_for_is_kept_and_counted(with_bos, tmp_path):
    tokenizer = byte_level_tokenizer(**({"bos_token": "<bos>"} if with_bos else {}))
    write(tmp_path / "train.jsonl", *LONG_ROWS)
    fits, long_answer, long_prompt = pairs_of(open_all(tokenizer).train)
    num_first = 1 if with_bos else 0  # BOS stays first
    ends = [each[:num_first] + each[num_first - 16 :] for each in (long_answer, long_prompt)]
    for strategy, kept, counts, note in (
        ("truncate", [fits, long_answer[:16]], (2, 0, 1), "2 of 3 samples truncated at 16 tokens"),
        ("keep_end", [fits, *ends], (2, 0, 0), "2 of 3 samples truncated at 16 tokens"),
        ("drop", [fits], (0, 2, 0), "2 of 3 samples left out: longer than 16 tokens"),
    ):
        opened = open_all(tokenizer, max_length=16, excess_length_strategy=strategy)
        assert pairs_of(opened.train) == kept and f"train.jsonl: {note}" in opened.notes
        (report,) = opened.describe()["sources"]
        names = ("num_truncated", "num_dropped_long", "num_dropped_unsupervised")
        assert tuple(report[name] for name in names) == counts and report["num_rows"] == 3
        supervised = [[weight for _, weight in each[1:] if weight] for each in kept]  # nothing predicts a first token
        assert opened.train.num_targets.tolist() == [len(each) for each in supervised]


def test_a_text_with_the_character_of_images_is_cut_like_any_other(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", chat("Hi \ufdd2", "Hello " * 20))
    opened = open_all(tokenizer, max_length=32, chat_template="chatml")
    assert "train.jsonl: 1 of 1 samples truncated at 32 tokens" in opened.notes


def test_what_is_too_long_stops_the_run_where_that_is_asked_for(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *LONG_ROWS)
    with pytest.raises(UserError, match=r"train.jsonl:2: \d+ tokens; expected at most 16\n.*\n.*train.jsonl:3: "):
        open_all(tokenizer, max_length=16, excess_length_strategy="error")


def test_a_long_text_is_chunked_and_each_token_but_the_first_is_supervised_once(tmp_path, tokenizer):
    text = "Hello there, how are you? " * 20
    write(tmp_path / "train.jsonl", {"text": text})
    whole = open_all(tokenizer, max_length=2048).train[0][0].tolist()
    opened = open_all(tokenizer, max_length=16, excess_length_strategy="split")
    pieces = [ids.tolist() for ids, _ in opened.train]
    assert len(whole) > 60 and all(len(piece) <= 16 for piece in pieces)
    assert pieces[0] + [id_ for piece in pieces[1:] for id_ in piece[1:]] == whole
    assert opened.train.num_targets.sum() == len(whole) - 1
    assert "train.jsonl: 1 of 1 samples chunked into pieces of 16 tokens" in opened.notes


def test_weights_of_messages_reach_the_samples(tmp_path, tokenizer):
    messages = chat("Hi", "Hello", "Bye", "Bye now")["messages"]
    messages[1]["weight"], messages[3]["weight"] = 0.25, 3
    write(tmp_path / "train.jsonl", {"messages": messages})
    train = open_all(tokenizer, chat_template="chatml").train
    weights = train[0][1]
    assert set(weights.tolist()) == {0, 0.25, 3}
    assert train.target_weights[0] == weights.sum() and train.num_targets[0] == (weights > 0).sum()


def test_a_chat_set_with_nothing_masked_is_an_error_unless_it_is_asked_for(tmp_path, tokenizer):
    (tmp_path / "all.jinja").write_text("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}")
    write(tmp_path / "train.jsonl", {"messages": [{"role": "assistant", "content": "Hello"}]})
    with pytest.raises(UserError, match=r"every token of every conversation is supervised.*\n.*--train_on all"):
        open_all(tokenizer, chat_template="all.jinja")
    assert open_all(tokenizer, chat_template="chatml", train_on="all").train.num_targets[0] > 5


def test_ids_beyond_the_model_are_refused(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *pairs(2))
    with pytest.raises(UserError, match="a token id out of range for the model's vocabulary of 20"):
        open_all(tokenizer, 20)


def test_columns_that_are_not_used_are_reported_with_their_share(tmp_path, tokenizer):
    rows = [{"prompt": f"Q{i} ", "completion": "a", "source": "web", "url": "x" if i < 3 else None} for i in range(12)]
    write(tmp_path / "train.jsonl", *rows)
    (note,) = [note for note in open_all(tokenizer).notes if "not in the text" in note]
    assert note == "train.jsonl: not in the text: source (100.0% of the rows), url (25.0% of the rows)"
    write_any("train.parquet", rows)  # columns of a table that are not read count in each row
    (note,) = [note for note in open_all(tokenizer, dataset="train.parquet").notes if "not in the text" in note]
    assert note.endswith("source (100.0% of the rows), url (100.0% of the rows)")


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_a_column_that_would_change_the_training_stops_the_start(name, tmp_path, tokenizer):
    write_any(name, [row | {"videos": [f"{i}.mp4"] if i > 2 else []} for i, row in enumerate(pairs(6))])
    found = "media other than text, images and audio, which are not supported"
    with pytest.raises(UserError, match=rf"videos: {found} \(at train.* and 2 more\)"):
        open_all(tokenizer, dataset=name)
    ignoring = open_all(tokenizer, dataset=name, dataset_columns="videos=ignore")
    assert len(ignoring.train) == 6


def test_texts_that_are_the_same_once_cut_are_left_out_and_a_cell_of_a_table_is_a_margin(tmp_path, tokenizer):
    write(
        tmp_path / "train.jsonl",
        {"chosen": "a " * 50 + "b", "rejected": "a " * 50 + "c", "margin": 1},
        {"chosen": "a", "rejected": "b", "margin": "0.5"},
    )
    opened = open_all(tokenizer, max_length=16, objective="reward")
    assert "train.jsonl: 1 of 2 samples left out: longer than 16 tokens" in opened.notes
    assert opened.train.values.tolist() == [[0.5]]
    write(tmp_path / "train.jsonl", {"chosen": "a", "rejected": "b", "margin": "far"})
    with pytest.raises(UserError, match=r"train.jsonl:1 margin: 'far'; expected a number"):
        open_all(tokenizer, max_length=16, objective="reward")


def test_a_conversation_that_is_classified_has_no_generation_prompt(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", chat("Hi", "Hello") | {"label": "a"}, chat("Hi", "Hello", "Bye") | {"label": "b"})
    opened = open_all(tokenizer, objective="classify", labels="a,b", chat_template="chatml", max_length=128)
    assert [tokenizer.decode(ids).count("<|im_start|>") for ids, _ in opened.train] == [2, 3]
    assert not [note for note in opened.notes if "after the last answer" in note]


ASKED = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": "Hello"}
CALLED = [SAID | {"content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "4", "name": "weather"}]


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        (chat("Hi", "Hello", "And now?", "Bye", system="Be kind."), {}),
        ({"messages": [ASKED, *CALLED, SAID]}, {}),
        ({"messages": [ASKED, SAID, ASKED, SAID | {"weight": 0}, ASKED]}, {}),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, {}),
        ({"prompt": [ASKED, *CALLED], "completion": "4"}, {"system_prompt": "Be kind."}),
        ({"prompt": "Hi", "completion": "Hello"}, {}),
        ({"q": "Hi", "a": "Hello"}, {"dataset_columns": {"q": "instruction", "a": "output"}}),
        ({"instruction": "Add", "input": "4 2", "output": "6", "history": [["Hi", "Hello"]], "system": "Be kind."}, {}),
    ],
)
def test_tools_are_listed_in_each_prompt_whose_messages_can_be_had_again(row, changes, tmp_path):
    """For a rollout with tools, which begins with these messages, and its ids with those of ``ToolTurns``."""
    tokenizer = byte_level_tokenizer(eos_token="<|im_end|>")
    write(tmp_path / "train.jsonl", {**row, "level": 1}, {**row, "level": 2})
    settings = {"chat_template": "chatml", "max_length": 2048, **changes}
    bare, train = (open_all(tokenizer, tools=tools, **settings).train for tools in ((), [WEATHER]))
    tool_turns = ToolTurns(template_of("chatml", tokenizer), tokenizer, [WEATHER])
    for i in range(2):
        assert train.prompt(i).ids == tool_turns.prompt(train.prompt_messages(i))
        assert (
            "weather" in tokenizer.decode(train.prompt(i).ids) and train.prompt(i).reference == bare.prompt(i).reference
        )
        assert bare.prompt_messages(i) == train.prompt_messages(i)
    assert train.fingerprint != bare.fingerprint  # in the cache too


@pytest.mark.parametrize(
    ("row", "changes", "found"),
    [
        (chat("Hi", "Hello") | {"tools": [WEATHER]}, {}, "tools: a row's own, beside --tools"),
        (chat("Hi", "Hello") | {"chat_template_kwargs": {"mode": 1}}, {}, "chat_template_kwargs: a row's own"),
        ({"text": "Hi"}, {}, "tools: given, but this row is no conversation"),
        (
            {"prompt": "Hi", "completion": "Hello"},
            {"chat_template": None},
            "tools: given for a prompt or a completion that is a string",
        ),
        (chat("Hi", "Hello", "Bye", "Bye"), {"chat_template": "rewrites"}, "these answers have no prompt in common"),
    ],
)
def test_a_row_to_whose_prompt_tools_cannot_be_added_is_refused(row, changes, found, tmp_path):
    (tmp_path / "rewrites").write_text(template_of("qwen3", None))
    tokenizer = byte_level_tokenizer(eos_token="<|im_end|>")
    write(tmp_path / "train.jsonl", row)
    settings = {"chat_template": "chatml", "max_length": 2048, **changes}
    with pytest.raises(UserError) as caught:
        open_all(tokenizer, tools=[WEATHER], **settings)
    assert found in str(caught.value)
