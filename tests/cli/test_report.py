"""``kit report`` writes the page of one run or of several, also while they run, and refuses what is no run."""

import json

import pytest
from report_helpers import evaluation_row, make_run, step_row

from kit.cli.main import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run that was killed while it wrote the line of its third step."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", [step_row(1), step_row(2)])
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    return tmp_path / "run"


def refused(capsys, *words):
    """What a refused command says."""
    assert main(["report", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ")
    return err


def test_it_is_written_of_a_run_as_far_as_it_has_come_and_found_from_what_lies_in_it(folder, capsys):
    (folder / "checkpoints/step-00000002").mkdir(parents=True)
    for inside in ("", "checkpoints/step-00000002"):
        assert main(["report", str(folder / inside)]) == 0
        assert capsys.readouterr().out == f"report: {folder}/report.html\n"
        assert "2 of 9 steps" in (folder / "report.html").read_text()
    with (folder / "metrics.jsonl").open("a") as file:  # it goes on
        file.write("\n" + json.dumps(step_row(4)) + "\n")
    assert main(["report", str(folder)]) == 0
    assert "4 of 9 steps" in (folder / "report.html").read_text()


def test_several_runs_are_compared_on_a_page_and_on_the_terminal(folder, tmp_path, capsys):
    other = make_run(tmp_path / "other", [step_row(1, loss=0.5), evaluation_row(1)], versions={"torch": "2.12.0"})
    before = sorted(other.iterdir())
    for _ in range(2):  # its own page may be written again
        assert main(["report", str(folder), str(other)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split()[:2] == ["run", "state"] and lines[1].split()[1:4] == ["not", "finished:", "2"]
        assert ["torch", "2.13.0", "2.12.0"] in [line.split() for line in lines]
        assert lines[-1] == f"report: {tmp_path}/comparison.html"
    assert sorted(other.iterdir()) == before


def test_a_folder_of_runs_is_a_comparison_of_them_each_once(folder, tmp_path, capsys):
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name)
    (tmp_path / "runs/notes").mkdir()
    (tmp_path / "runs/latest").symlink_to("b")
    # runs/ is where runs are; runs/* of a shell names the page too
    for words in ([], ["runs"], ["runs/a", "runs/b", "runs/comparison.html", "runs/b/../a"]):
        assert main(["report", *words]) == 0
        out = capsys.readouterr().out
        assert "latest" not in out and "nothing differs" in out
        assert "<title>2 runs: runs/a, runs/b</title>" in (tmp_path / "runs/comparison.html").read_text()


def test_a_file_that_is_no_report_is_not_overwritten(folder, tmp_path, capsys):
    (tmp_path / "thesis.html").write_text("mine")
    for path in ("thesis.html", str(folder)):
        assert "exists, and is not a report" in refused(capsys, folder, "--output", path)
    assert (tmp_path / "thesis.html").read_text() == "mine"
    assert "page.html: cannot be written (No such file" in refused(capsys, folder, "--output", "absent/page.html")
