"""``kit cache`` says what is in the cache, and removes only what it is asked to."""

import os
import time

import numpy as np
import pytest

from kit.cli.main import main
from kit.system import cache


@pytest.fixture(autouse=True)
def samples(tmp_path, monkeypatch):
    """Two entries of 4 kB of tokens each, of which the first was last used four weeks ago, and one that a kill left."""
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))
    samples = cache.make_folder("samples")
    for number, name in enumerate("ab"):
        with cache.locked(samples / (name * 32)):
            writer = cache.Writer(samples / (name * 32))
            writer.append({"input_ids": np.arange(1000, dtype=np.int32)})
            writer.finish({"about": {"dataset": f"{number}.jsonl", "tokenizer": "x\nerror: \x1b[2J"}})
    (samples / ".c.1234").mkdir()
    for name in ("a" * 32, ".c.1234"):
        os.utime(samples / name, (time.time() - 28 * 86400,) * 2)
    return samples


def typed(capsys, *words, status=0):
    assert main(["cache", *words]) == status
    return "".join(capsys.readouterr()).splitlines()


def test_the_list_has_a_line_for_each_entry_the_one_used_last_at_the_end(samples, capsys):
    *_, last, total = lines = typed(capsys)
    assert len(lines) == 4 and last.startswith("b" * 12) and '"dataset": "1.jsonl"' in last
    assert total.startswith(f"{samples.parent}: 3 entries, 0.0 MB")
    assert any("(damaged or unfinished)" in line for line in lines)
    assert not any(line.startswith("error") or "\x1b" in line for line in lines)
    cache.open_entry(samples / ("a" * 32))
    assert typed(capsys)[-2].startswith("a" * 12)


def test_what_no_run_has_opened_for_long_is_removed_and_nothing_else(samples, capsys):
    assert typed(capsys, "prune", "--older_than", "7")[-1].startswith("removed: 2 entries")
    assert [path.name for path in samples.iterdir() if path.is_dir()] == ["b" * 32]
    assert cache.open_entry(samples / ("b" * 32)) and cache.open_entry(samples / ("a" * 32)) is None


def test_verify_reads_every_byte_and_a_damaged_entry_is_not_opened_again(samples, capsys, monkeypatch):
    assert typed(capsys, "verify")[-1].endswith("2 entries read, 0 damaged")
    file = samples / ("a" * 32) / "input_ids.bin"
    content, stamp = bytearray(file.read_bytes()), cache.file_stamp(file)
    content[3] ^= 1
    file.write_bytes(content)
    real = cache.file_stamp
    monkeypatch.setattr(cache, "file_stamp", lambda path: stamp if path == file.resolve() else real(path))  # a bad disk
    monkeypatch.setattr(cache, "YOUNG_SECONDS", -1.0)
    lines = typed(capsys, "verify", status=1)
    assert lines[0].startswith("a" * 12) and lines[-1].endswith("2 entries read, 1 damaged")
    assert cache.open_entry(file.parent) is None
