"""Bad data, through the real script: status 2, the place, what to do; no traceback, and nothing left behind."""

import gzip
import json
import re

import pytest
from helpers import matrix

pytestmark = pytest.mark.slow

GOOD = json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]})


def lines(*rows):
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows).encode()


def chat(*messages):
    return {"messages": [{"role": role, "content": content, **more} for role, content, more in messages]}


NO_ANSWER = chat(("user", "Hi", {}))
MUTED = chat(("user", "Hi", {}), ("assistant", "Hello", {"train": False}))
ASSISTANT_FIRST = chat(("assistant", "Hello", {}), ("user", "Hi", {}), ("assistant", "Bye", {}))
TWO_SYSTEMS = chat(("system", "a", {}), ("system", "b", {}), ("assistant", "Hello", {}))
ODD_TRAIN = chat(("user", "Hi", {}), ("assistant", "Hello", {"train": "yes"}))
NEGATIVE = chat(("user", "Hi", {}), ("assistant", "Hello", {"weight": -1}))

# Name of the file, its content, flags, and what is said.
CASES = {
    "invalid JSON": ("d.jsonl", lines(GOOD, '{"messages": '), {}, r"d.jsonl:2: not JSON at column 13"),
    "invalid UTF-8": ("d.jsonl", lines(GOOD) + b'{"text": "\xff"}\n', {}, r"d.jsonl:2: not UTF-8 at byte 11"),
    "empty file": ("d.jsonl", b"", {}, r"d.jsonl: no rows; expected at least one"),
    "blank lines only": ("d.jsonl", b"\n \n\n", {}, r"d.jsonl: no rows; expected at least one"),
    "missing column": (
        "d.jsonl",
        lines({"a": 1}),
        {},
        r"d.jsonl: columns a; expected messages, or conversations, or prompt and completion",
    ),
    "mixed schemas": ("d.jsonl", lines(GOOD, {"text": "a"}), {}, r"d.jsonl:2: no 'messages' \(it has text\)"),
    "wrong type": ("d.jsonl", lines({"text": 3}), {}, r"d.jsonl:1 text: a number; expected a string"),
    "unknown role": ("d.jsonl", lines(chat(("usr", "a", {}))), {}, r"d.jsonl:1 messages\[0\].role: found 'usr'"),
    "missing content": (
        "d.jsonl",
        lines({"messages": [{"role": "assistant"}]}),
        {},
        r"d.jsonl:1 messages\[0\].content: missing",
    ),
    "two system messages": ("d.jsonl", lines(TWO_SYSTEMS), {}, r"messages\[1\]\S*: a second system message"),
    "assistant first": (
        "d.jsonl",
        lines(ASSISTANT_FIRST),
        {"chat_template": "alpaca"},
        r"chat_template: .*user.*\(at \S*d.jsonl:1\)",
    ),
    "no assistant turn": ("d.jsonl", lines(GOOD, NO_ANSWER), {}, r"d.jsonl:2 messages: no assistant turn"),
    "everything masked": ("d.jsonl", lines(MUTED), {}, r"nothing in 1 samples is supervised"),
    "template without its token": ("d.jsonl", lines(GOOD), {"chat_template": "gemma"}, r"'gemma' needs .* would split"),
    "cut short": ("d.jsonl.gz", gzip.compress(lines(*[GOOD] * 999))[:-20], {}, r"d.jsonl.gz: (cut short|damaged)"),
    "no match": ("d.jsonl", lines(GOOD), {"dataset": "nothing-*.jsonl"}, r"no file or folder '\S*nothing-\*.jsonl'"),
    "hub without network": ("d.jsonl", lines(GOOD), {"dataset": "someone/else"}, r"no file or folder 'someone/else'"),
    "train of the wrong type": (
        "d.jsonl",
        lines(ODD_TRAIN),
        {},
        r"d.jsonl:1 messages\[1\].train: a string; expected true",
    ),
    "negative weight": ("d.jsonl", lines(NEGATIVE), {}, r"d.jsonl:1 messages\[1\].weight: -1; expected "),
    "weights all zero": ("d.jsonl", lines(GOOD), {"dataset": "[{path: d.jsonl, weight: 0}]"}, r"all weights are 0"),
    "negative share": ("d.jsonl", lines(GOOD), {"dataset": "[{path: d.jsonl, weight: -1}]"}, r"weight: found '-1'"),
    "same name": ("d.jsonl", lines(GOOD), {"dataset": "d.jsonl,x/d.jsonl"}, r"two data sets of the name 'd'"),
    "50 MB line": ("d.jsonl", lines(GOOD, "x" * 50_000_000), {}, r"d.jsonl:2: a line of more than 16 MiB"),
    "pickle": ("d.pkl", b"cos\nsystem\n(S'touch pwned'\ntR.", {}, r"d.pkl' ends in '.pkl'; expected .jsonl"),
}


@pytest.mark.parametrize("case", matrix(CASES, always=8))
def test_bad_input_is_answered_in_words(case, finetune, tmp_path):
    name, content, flags, message = CASES[case]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_bytes(content)
    named = flags.get("dataset", name)
    flags = flags | {"dataset": named if named.startswith(("[", "someone", "d.jsonl,")) else tmp_path / "data" / named}
    run = finetune("run", **flags)
    assert run.status == 2, run.output
    assert re.search(message, run.output), run.output
    assert "Traceback" not in run.output and run.output.count("error:") == 1
    assert not run.folder.exists() and not list(tmp_path.rglob("pwned"))
