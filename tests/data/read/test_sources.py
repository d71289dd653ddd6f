"""What a name leads to: files, a folder, a pattern, or a reason why it leads nowhere."""

import os

import pytest
from data_helpers import contents, json_lines, problems, refused, rows_of, source_of, text_rows, write_any

from kit.data.read import sources
from kit.data.read.sources import FIX_ROWS
from kit.system.errors import UserError

# Names


def test_a_pattern_takes_all_files_in_order(folder):
    for i in (1, 0, 10):
        (folder / "data" / str(i)).mkdir(parents=True)
        (folder / "data" / str(i) / "rows.jsonl").write_bytes(json_lines(text_rows(2, i)))
    source = source_of("data/**/*.jsonl")
    assert [part.name for part in source.parts] == [f"data/{i}/rows.jsonl" for i in (0, 1, 10)]
    assert contents(source) == [*text_rows(2, 0), *text_rows(2, 1), *text_rows(2, 10)]
    assert source.origin(2, 1) == "data/10/rows.jsonl:1"


def make_folder(path, *names):
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text('{"text": "a"}\n')


def test_a_folder_gives_its_files_or_those_of_the_split(folder):
    data = folder / "data"
    for name in ("b.jsonl", "a.csv", "sub/c.jsonl", ".hidden.jsonl", "README.md", "dataset_infos.json"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text("text\na\n" if name.endswith("csv") else '{"text": "a"}\n')
    assert [part.name for part in source_of("data/").parts] == ["data/a.csv", "data/b.jsonl", "data/sub/c.jsonl"]
    make_folder(folder / "sorted", "train-0.jsonl", "train-1.jsonl", "test.jsonl", "validation/0.jsonl")
    assert [part.name for part in source_of("sorted").parts] == ["sorted/train-0.jsonl", "sorted/train-1.jsonl"]
    assert [part.name for part in source_of("sorted", "validation").parts] == ["sorted/validation/0.jsonl"]
    reported = refused("sorted", "validatoin")
    assert "dataset_split: sorted has no split 'validatoin'; expected test, train, validation" in reported
    assert "did you mean 'validation'?" in reported


def test_what_of_a_folder_is_not_read_is_counted_by_its_ending(folder):
    data = folder / "data"
    make_folder(data, "a.jsonl", "b.xlsx", "c.XLSX", "LICENSE", "notes.txt", "more/d.md", ".git/e", "dataset_info.json")
    (data / "g.csv").symlink_to("nowhere.csv")
    (note,) = source_of("data").notes
    assert note == "data: 6 files are not read as rows: .csv (1), .md (1), .txt (1), .xlsx (2), no ending (1)"
    assert source_of("data/a.jsonl").notes == ()


def test_a_folder_that_is_half_named_after_splits_is_refused_with_both_halves(folder):
    make_folder(folder / "f", "train/0.jsonl.gz", "more/0.jsonl.gz", "dataset_info.json")
    assert refused("f/") == (
        "error: dataset: 'f' has files named after a split (train/0.jsonl.gz, ...) and others (more/0.jsonl.gz, ...); "
        "expected all of them named so, or none\n"
        "    -> name those that you mean by a glob, or sort them into folders such as train and test"
    )


def test_a_name_for_which_nothing_is_found_is_reported(folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    write_any("train.jsonl", text_rows(1))
    (folder / "empty").mkdir()
    for name, message in (
        ("trian.jsonl", "dataset: no file or folder 'trian.jsonl'; expected a file (.jsonl, .ndjson, .json, .csv"),
        ("trian*.jsonl", "did you mean 'train.jsonl'?"),
        ("nowhere/*/x.jsonl", "no file or folder 'nowhere/*/x.jsonl', nor a folder 'nowhere'"),
        ("empty", "'empty' is a folder without data files"),
        ("a" * 300 + ".jsonl", "cannot be read (File name too long)"),
        ("someone/something", "and it is not in the cache; HF_HUB_OFFLINE forbids to download it"),
    ):
        assert message in refused(name)


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match=r"'pipe.jsonl' is neither a file nor a folder"):
        source_of("pipe.jsonl")


# Rows that cannot be used


def test_a_file_without_a_usable_row_is_reported_with_the_first_ten_problems_and_one_fix(folder):
    for content in ("", "\n\n", "{}\n"):
        (folder / "train.jsonl").write_text(content)
        assert "train.jsonl: no rows; expected at least one" in refused("train.jsonl")
    (folder / "train.jsonl").write_text("}\n" * 612)
    reported = refused("train.jsonl").splitlines()
    assert reported[0] == "error: 612 problems, 10 of them shown"
    assert reported[10].startswith("  - train.jsonl:10: not JSON")
    assert reported[11:] == ["  - train.jsonl: ... and 602 more problems", f"    -> {FIX_ROWS}"]


# Digests


def test_the_digest_is_of_content_and_kind_wherever_it_lies(folder):
    (folder / "other").mkdir()
    for name in ("a.jsonl", "other/b.jsonl", "a.csv"):
        (folder / name).write_bytes(json_lines(text_rows(3)))
    digest = source_of("a.jsonl").digest
    assert source_of("other/b.jsonl").digest == source_of("other").digest == source_of("./*.jsonl").digest == digest
    seen = {digest, source_of("a.csv").digest, source_of("*.*").digest}
    (folder / "a.jsonl").write_bytes(json_lines(text_rows(3)).replace(b"0", b"7"))
    seen.add(source_of("a.jsonl").digest)
    assert len(seen) == 4


def test_lines_of_a_text_file_are_rows(folder):
    (folder / "a.txt").write_bytes("\ufeffone \r\n\n two ü\n".encode() + b"\xff\n" + b"last")
    rows = rows_of(source_of("a.txt"))
    assert [(n, row) for n, row in rows if n != 4] == [
        (1, {"text": "one "}),
        (2, None),
        (3, {"text": " two ü"}),
        (5, {"text": "last"}),
    ]
    assert problems(source_of("a.txt")) == ["a.txt:4: not UTF-8 at byte 1 of the line; expected UTF-8 text"]


def test_a_text_file_next_to_other_data_is_no_data(folder):
    (folder / "data").mkdir()
    (folder / "data/README.txt").write_text("Read me\n")
    assert contents(source_of("data")) == [{"text": "Read me"}]
    (folder / "data/a.jsonl").write_bytes(json_lines(text_rows(2)))
    assert contents(source_of("data")) == text_rows(2)


def test_whether_a_name_means_the_hub_is_known_without_reading(folder):
    (folder / "a.jsonl").write_text("not JSON")
    assert sources.hub_id("a.jsonl", "", "dataset") is None
    assert sources.hub_id("org/data", "train", "dataset") == "org/data"
    with pytest.raises(UserError, match=r"no file or folder 'b.jsonl'"):
        sources.hub_id("b.jsonl", "", "dataset")


# Links


def with_private_file(folder):
    (folder / "private.jsonl").write_text('{"text": "secret"}\n')
    make_folder(folder / "data", "a.jsonl")
    return folder / "data"


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_link_out_of_a_folder_is_refused_and_a_pattern_takes_it(is_folder, folder):
    data = with_private_file(folder)
    if is_folder:
        make_folder(folder / "other", "more.jsonl")
        (data / "sub").symlink_to("../other")
    else:
        (data / "more.jsonl").symlink_to("../private.jsonl")
    message = refused("data")
    assert "more.jsonl is a link to" in message
    assert len(contents(source_of("data/**/*.jsonl"))) == 2


def test_links_within_a_folder_and_those_of_the_hub_are_followed(folder):
    make_folder(folder / "data", "a.jsonl")
    (folder / "data/b.jsonl").symlink_to("a.jsonl")
    assert len(contents(source_of("data"))) == 2
    repository = folder / "hub/datasets--me--mine"
    make_folder(repository / "blobs", "0123")
    (repository / "snapshots/abcd").mkdir(parents=True)
    (repository / "snapshots/abcd/train.jsonl").symlink_to("../../blobs/0123")
    assert len(contents(source_of("hub/datasets--me--mine/snapshots/abcd"))) == 1
    (folder / "from_hub").symlink_to(repository / "snapshots/abcd")
    assert len(contents(source_of("from_hub"))) == 1
    (folder / "linked").symlink_to("data")
    assert len(contents(source_of("linked"))) == 2  # the user's own link
