"""The commands that a message names for a file are run, and the kit reads what they make."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from data_helpers import contents, refused, source_of

from kit.data.read import repairs
from kit.data.read.archives import DECOMPRESSORS

ROWS = [{"q": f"größer als {i}?", "a": f"ja, {i} „so“"} for i in range(3)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
CELLS = "q;a\n" + "".join(f"{row['q']};{row['a']}\n" for row in ROWS)


def typed(message):
    """Run the command in backticks that a message names; return the data set that it names then, if it does."""
    command = re.search("`(.*)`", message)[1].replace("python -c", f"{sys.executable} -c", 1)
    subprocess.run(command, shell=True, check=True)
    found = re.search(r"`, then --dataset (\S+)$", message)
    return found[1] if found else None


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-16-be-sig", "utf-32"])
@pytest.mark.parametrize(("name", "text"), [("my rows.csv", CELLS), ("a.jsonl", LINES)])
def test_a_file_in_another_encoding_is_written_in_utf8_and_kept(name, text, encoding, folder):
    data = b"\xfe\xff" + text.encode("utf-16-be") if encoding == "utf-16-be-sig" else text.encode(encoding)
    Path(name).write_bytes(data)
    problem = refused(name) if "utf" in encoding or "csv" not in name else repairs.in_utf8(name)
    assert "--on_bad_row" not in problem
    typed(problem)
    assert contents(source_of(name)) == ROWS
    assert data in [path.read_bytes() for path in folder.iterdir()]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_a_compressed_file_stays_compressed(suffix, folder):
    name = f"a.jsonl{suffix}"
    with DECOMPRESSORS[suffix](name, "wb") as file:
        file.write(LINES.encode("cp1252"))
    typed(refused(name))
    assert contents(source_of(name)) == ROWS


def test_a_file_in_which_single_lines_are_damaged_is_not_converted(folder):
    Path("a.csv").write_bytes(CELLS.encode() + b"\xe4;b\n")
    assert repairs.in_utf8("a.csv") == ""
    Path("a.csv").write_bytes(b"\x81\x8d\x8f\n")  # nor by a guess that fails
    assert repairs.in_utf8("a.csv") == repairs.in_utf8("gone.csv") == repairs.ENCODING


JSON = {
    "one list in an object": json.dumps({"version": 1, "data": ROWS}),
    "over several lines": json.dumps({"data": ROWS}, indent=2),
    "splits": json.dumps({"test": ROWS * 2, "train": ROWS}, indent=2),
    "rows by name": json.dumps({str(i): row for i, row in enumerate(ROWS)}, indent=1),
    "columns": json.dumps({key: [row[key] for row in ROWS] for key in ROWS[0]}, indent=1),
    "one after another": "\n".join(json.dumps(row, indent=2) for row in ROWS),
    "lines with commas": ",\n".join(map(json.dumps, ROWS)) + ",\n",
    "as Python prints it": "".join(f"{row}\n" for row in ROWS),
}


@pytest.mark.parametrize("kind", JSON)
def test_rows_inside_of_a_larger_json_value_are_written_one_a_line(kind, folder):
    Path("it's.json").write_text(JSON[kind], encoding="utf-8")
    fix = repairs.as_lines(source_location("it's.json"), "dataset")
    typed(fix)
    assert contents(source_of("it's.rows.jsonl")) == ROWS
    assert "s.rows2.jsonl" in repairs.as_lines(source_location("it's.json"), "dataset")  # nothing is overwritten


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "x}',
        '{"a": 1}\n{"a": "}\n{"}\n{',
        '{"q": 1, "q": 2}\n}',
        json.dumps({"conversation": [{"role": "user"}]}),
    ],
)
def test_no_command_is_named_for_what_it_would_not_read(text, folder):
    Path("a.json").write_text(text)
    assert repairs.as_lines(source_location("a.json"), "dataset") == ""


def source_location(name):
    return repairs.Location(name, Path(name).stat().st_size)


def test_two_columns_with_one_name_get_two_and_carriage_returns_become_line_feeds(folder):
    Path("a.csv").write_text("q,a,a,a_2\n1,2,3,4\n")
    typed(refused("a.csv"))
    assert contents(source_of("a.csv")) == [{"q": "1", "a": "2", "a_3": "3", "a_2": "4"}]
    Path("b.csv").write_bytes(b"q,a\r1,2\r3,4\r")
    typed(refused("b.csv"))
    assert contents(source_of("b.csv")) == [{"q": "1", "a": "2"}, {"q": "3", "a": "4"}]


@pytest.mark.parametrize("name", ["my.xlsx", "my.docx", "my.PDF", "model.pkl", "notes.md"])
def test_of_a_file_in_another_form_the_message_says_what_to_write(name, folder):
    Path(name).write_bytes(b"x")
    assert ".jsonl" in refused(name).partition("->")[2] or "CSV UTF-8" in refused(name)
    Path("docs").mkdir()
    Path("docs", name).write_bytes(b"x")
    message = refused("docs")
    assert f"(it has {Path(name).suffix.lower()} (1))" in message and "->" in message
