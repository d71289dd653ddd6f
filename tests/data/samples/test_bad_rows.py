"""Rows that cannot be used: each is reported, few may be skipped, and all that are skipped are listed."""

import json

import pytest

from kit.data.samples.bad_rows import BadRow, append_listed, check_share
from kit.errors import Problem, UserError


def bad(number):
    return BadRow(0, number, f"train.jsonl:{number}", Problem("prompt", "empty", "text"), is_common=False)


def test_at_most_a_tenth_may_be_skipped_but_always_one():
    for num_bad, num_good in ((1, 1), (2, 18), (10, 90)):
        check_share("train.jsonl", [], num_bad, num_good)
    for num_bad, num_good in ((2, 8), (11, 89)):
        with pytest.raises(UserError) as caught:
            check_share("train.jsonl", [bad(0)], num_bad, num_good)
        assert "cannot be used; expected at most 10% to skip" in str(caught.value)
        assert "train.jsonl:0 prompt: empty" in str(caught.value)


def test_a_stream_lists_each_row_once_also_after_a_resume(tmp_path):
    file = tmp_path / "skipped.jsonl"
    for rows in ([bad(2), bad(3)], [bad(2)], [bad(3), bad(5)]):
        append_listed(file, rows)
    rows = [json.loads(line)["row"] for line in file.read_text().splitlines()]
    assert rows == ["train.jsonl:2", "train.jsonl:3", "train.jsonl:5"]
