"""Rows that cannot be used: each is reported, few may be skipped, and all that are skipped are listed."""

import json

from kit.data.samples.bad_rows import BadRow, append_listed
from kit.system.errors import Problem


def bad(number):
    return BadRow(0, number, f"train.jsonl:{number}", Problem("prompt", "empty", "text"), is_common=False)


def test_a_stream_lists_each_row_once_also_after_a_resume(tmp_path):
    file = tmp_path / "skipped.jsonl"
    for rows in ([bad(2), bad(3)], [bad(2)], [bad(3), bad(5)]):
        append_listed(file, rows)
    rows = [json.loads(line)["row"] for line in file.read_text().splitlines()]
    assert rows == ["train.jsonl:2", "train.jsonl:3", "train.jsonl:5"]
