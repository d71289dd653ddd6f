"""``kit cache`` says what is in the cache, and removes only what it is asked to, and nothing that is open."""

import os
import time

import numpy as np
import pytest

from kit import cache
from kit.cli.main import main
from kit.train.precompute import FOLDER, _store


@pytest.fixture(autouse=True)
def samples(tmp_path, monkeypatch):
    """Three entries of 4 kB of tokens each; the first was last used four weeks ago, the second two."""
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))
    samples = cache.make_folder("samples")
    for number, name in enumerate(("a" * 32, "b" * 32, "c" * 32)):
        with cache.locked(samples / name):
            writer = cache.Writer(samples / name)
            writer.append({"input_ids": np.arange(1000, dtype=np.int32)})
            about = {"dataset": f"{number}.jsonl", "tokenizer": "small", "template": "12345678", "max_length": 64}
            writer.finish({"counts": {"num_rows": 1200}, "about": about})
        used = time.time() - (4 - 2 * number) * 7 * 86400
        os.utime(samples / name, (used, used))
    return samples


@pytest.fixture
def references(samples):
    """An entry of a reference's log-probabilities, last used three weeks ago."""
    references = cache.make_folder(FOLDER)
    folder = references / ("e" * 32)
    with cache.locked(folder):
        writer = cache.Writer(folder)
        writer.append({"references": np.zeros(256)})
        writer.finish({"about": {"num_samples": 128, "model": "org/mod\nel"}})
    os.utime(folder, (time.time() - 3 * 7 * 86400,) * 2)
    return references


def names(samples):
    return "".join(sorted(path.name[0] for path in samples.iterdir() if path.is_dir()))


def typed(capsys, *words, status=0):
    assert main(["cache", *words]) == status
    return capsys.readouterr().out


def test_the_list_has_a_line_for_each_entry_the_one_used_last_at_the_end(samples, capsys):
    *head, first, _, last, total = typed(capsys).splitlines()
    assert head[0].split() == "entry last used size rows tokens max_length template tokenizer data set".split()
    assert first.split()[0] == "a" * 12 and last.split()[0] == "c" * 12
    assert last.split()[3:] == ["4.3", "kB", "1,200", "1,000", "64", "12345678", "small", "2.jsonl"]
    assert total == f"{samples.parent}: 3 entries, 12.9 kB"


def test_no_name_in_the_list_begins_a_line(samples, capsys, monkeypatch):
    names = {"dataset": "x\nerror: forged", "tokenizer": "y\x1b[2J"}
    entry = {"arrays": {"input_ids": {"bytes": 4}}, "info": {"counts": {}, "about": names}}
    monkeypatch.setattr(cache, "read_entry", lambda folder: entry)
    lines = typed(capsys).splitlines()
    assert not any(line.startswith("error") for line in lines)
    assert "y\\x1b[2J" in lines[1] and "x\\nerror: forged" in lines[1]


def test_opening_an_entry_notes_when_it_was_used(samples, capsys):
    cache.open_entry(samples / ("a" * 32))
    assert typed(capsys).splitlines()[-2].startswith("a" * 12)


def test_an_empty_cache_is_listed_and_pruned(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "none"))
    for words in ([], ["prune", "--keep", "1GB"], ["verify"]):
        typed(capsys, *words)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--older_than", "3w"], "bc"),
        (["--older_than", "20d"], "bc"),
        (["--older_than", "240h"], "c"),
        (["--keep", "0"], ""),
        (["--keep", "0.009MB"], "bc"),
        (["--keep", "1GB"], "abc"),
        (["--older_than", "3w", "--keep", "0.005 MB"], "c"),
        ([], "abc"),
        (["--keep", "0", "--dry_run"], "abc"),
    ],
)
def test_prune_removes_what_was_not_used_for_longest(samples, capsys, words, left):
    out = typed(capsys, "prune", *words)
    assert names(samples) == left
    expected = 3 - len(left) if "--dry_run" not in words else 3
    assert f"removed: {expected} entries" in out


@pytest.mark.parametrize("name", ["digests", "packs"])
def test_prune_removes_old_files_that_are_made_again(samples, capsys, name):
    files = [cache.make_folder(name) / f"{age}.json" for age in ("old", "new")]
    for file, weeks in zip(files, (4, 1), strict=True):
        file.write_text("{}")
        os.utime(file, (time.time() - weeks * 7 * 86400,) * 2)
    typed(capsys, "prune", "--older_than", "3w")
    assert [file.exists() for file in files] == [False, True]


def test_prune_leaves_what_is_open(samples, capsys):
    arrays, _ = cache.open_entry(samples / ("a" * 32))
    out = typed(capsys, "prune", "--keep", "0")
    assert names(samples) == "a" and "in use by a run, and left: aaaaaaaaaaaa" in out
    assert arrays["input_ids"][-1] == 999


def test_prune_removes_what_killed_starts_left(samples, capsys):
    (samples / f".{'d' * 32}.4711").mkdir()
    assert "removed: parts of 1 entries that killed processes left" in typed(capsys, "prune")
    assert names(samples) == "abc"


def test_prune_removes_old_digests_of_files_too(samples, capsys):
    for name in ("digests", "packs"):
        folder = cache.make_folder(name)
        for file, weeks in (("old.json", 4), ("new.json", 1)):
            (folder / file).touch()
            os.utime(folder / file, (0, time.time() - weeks * 7 * 86400))
    typed(capsys, "prune", "--older_than", "3w")
    for name in ("digests", "packs"):
        left = {path.name for path in (samples.parent / name).iterdir()}
        assert "new.json" in left and "old.json" not in left


def test_verify_reads_every_byte(samples, capsys):
    assert "3 entries (12.9 kB) read, 0 damaged" in typed(capsys, "verify")
    with (samples / ("b" * 32) / "input_ids.bin").open("r+b") as file:
        file.write(b"x")
    out = typed(capsys, "verify", status=1)
    assert "input_ids.bin was altered" in out and "1 damaged; a run makes them again" in out
    (samples / ("c" * 32) / "entry.json").write_text("{")
    assert "(damaged: it is made again when needed)" in typed(capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prune", "--older_than", "30"], "'30' is no age such as 12h, 30d or 4w"),
        (["prune", "--keep", "20"], "'20' is no size such as 500MB, 20GB or 0"),
        (["list", "--dry_run", "--keep", "20GB"], "belong to prune: kit cache prune --dry_run --keep 20GB"),
        (["--keep", "20GB"], "belong to prune: kit cache prune --keep 20GB"),
    ],
)
def test_a_wrong_option_is_answered_with_what_is_expected(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["cache", *words])
    assert message in capsys.readouterr().err


def test_log_probabilities_of_references_are_listed_among_the_others(samples, references, capsys):
    *_, first, second, third, last, total = typed(capsys).splitlines()
    assert [line[0] for line in (first, second, third, last)] == list("aebc"), "by when they were used"
    words = second.split()
    assert words[:1] + words[3:9] == ["e" * 12, "2.3", "kB", "128", "-", "-", "-"]
    assert second.endswith("log-probabilities of the reference org/mod\\nel")
    assert total == f"{samples.parent}: 4 entries, 15.2 kB"


def test_what_a_run_stores_of_its_reference_is_listed(samples, capsys):
    _store(cache.make_folder(FOLDER) / ("d" * 32), np.zeros((3, 2)), "org/model", 3)
    (line,) = (line for line in typed(capsys).splitlines() if line.startswith("d" * 12))
    assert line.split()[5] == "3" and line.endswith("reference org/model")


def test_log_probabilities_of_references_are_verified(references, capsys):
    assert "4 entries (15.2 kB) read, 0 damaged" in typed(capsys, "verify")
    with (references / ("e" * 32) / "references.bin").open("r+b") as file:
        file.write(b"x")
    assert "references.bin was altered" in typed(capsys, "verify", status=1)
    (references / ("e" * 32) / "entry.json").write_text("{")
    assert "(damaged: it is made again when needed)" in typed(capsys)


def test_prune_takes_the_oldest_of_all_entries(samples, references, capsys):
    assert "would be removed: 2 entries" in typed(capsys, "prune", "--older_than", "17d", "--dry_run")
    assert names(references) == "e"
    assert "removed: 2 entries" in typed(capsys, "prune", "--older_than", "17d")
    assert names(samples) == "bc" and names(references) == ""


def test_prune_leaves_a_reference_that_is_open_and_removes_what_a_killed_run_left(samples, references, capsys):
    arrays, _ = cache.open_entry(references / ("e" * 32))
    (references / f".{'f' * 32}.4711").mkdir()
    out = typed(capsys, "prune", "--keep", "0")
    assert names(samples) == "" and names(references) == "e" and "in use by a run, and left: eeeeeeeeeeee" in out
    assert "removed: parts of 1 entries that killed processes left" in out and len(arrays["references"]) == 256
