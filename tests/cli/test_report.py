"""``kit report`` writes the page of one run or of several, also while they run, and refuses what is no run."""

import json
from dataclasses import replace

import pytest
from report_helpers import evaluation_row, make_run, step_row

from kit.cli import report
from kit.cli.main import main
from kit.tools.report import runs


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


def test_a_run_is_found_from_what_lies_in_it(folder, capsys):
    (folder / "final").mkdir()
    (folder / "checkpoints/step-00000002").mkdir(parents=True)
    for inside in ("final", "checkpoints", "checkpoints/step-00000002"):
        assert main(["report", str(folder / inside)]) == 0
        assert capsys.readouterr().out == f"report: {folder}/report.html\n"


def test_it_is_written_of_a_run_as_far_as_it_has_come(folder, capsys):
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"report: {folder}/report.html\n"
    assert "2 of 9 steps" in (folder / "report.html").read_text()
    with (folder / "metrics.jsonl").open("a") as file:  # it goes on
        file.write("\n" + json.dumps(step_row(4)) + "\n")
    assert main(["report", str(folder)]) == 0
    assert "4 of 9 steps" in (folder / "report.html").read_text()


def test_a_folder_without_a_run_is_refused_and_stays_as_it_was(tmp_path, capsys):
    assert refused(capsys, tmp_path).startswith(f"error: {tmp_path}/run.json: no record of a run")
    assert list(tmp_path.iterdir()) == []


def test_several_runs_are_compared_on_a_page_and_on_the_terminal(folder, tmp_path, capsys):
    other = make_run(tmp_path / "other", [step_row(1, loss=0.5), evaluation_row(1)], versions={"torch": "2.12.0"})
    before = sorted(other.iterdir())
    for _ in range(2):  # its own page may be written again
        assert main(["report", str(folder), str(other)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split()[:2] == ["run", "state"] and lines[1].split()[:4] == ["run", "not", "finished", "2"]
        assert ["torch", "2.13.0", "2.12.0"] in [line.split() for line in lines]
        assert lines[-1] == f"report: {tmp_path}/comparison.html"
    assert "<title>2 runs: run, other</title>" in (tmp_path / "comparison.html").read_text()
    assert sorted(other.iterdir()) == before
    make_run(tmp_path / "run", [step_row(1, loss=0.5), evaluation_row(1)], versions={"torch": "2.12.0"})
    assert main(["report", str(folder), str(other)]) == 0 and "  nothing differs" in capsys.readouterr().out


def test_a_folder_of_runs_is_a_comparison_of_them(folder, tmp_path, capsys):
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name)
    (tmp_path / "runs/notes").mkdir()
    (tmp_path / "runs/latest").symlink_to("b")
    for command in (["report", "runs"], ["report"]):  # runs/ is where runs are
        assert main(command) == 0
        assert "latest" not in capsys.readouterr().out
        assert "<title>2 runs: a, b</title>" in (tmp_path / "runs/comparison.html").read_text()
    # runs/* of a shell names the page too
    assert main(["report", "runs/a", "runs/b", "runs/comparison.html"]) == 0
    assert "is not a report" not in capsys.readouterr().err
    assert "is given twice" in refused(capsys, "runs", "runs/a")


def test_without_a_run_or_a_folder_of_runs_the_command_says_what_it_needs(folder, capsys):
    text = refused(capsys)
    assert "RUN: none is given, and there is no folder runs here" in text and "a folder of runs" in text


def test_all_that_is_wrong_with_several_runs_is_reported_at_once(folder, tmp_path, capsys):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    text = refused(capsys, folder, "one", "two")
    assert text.startswith("error: 2 problems") and "one/run.json: no record of a run" in text


def test_a_run_is_given_once(folder, capsys):
    assert "is given twice; expected each run once" in refused(capsys, folder, folder / "../run")


def test_a_file_that_is_no_report_is_not_overwritten(folder, tmp_path, capsys):
    (tmp_path / "thesis.html").write_text("mine")
    for path in ("thesis.html", str(folder)):
        assert "exists, and is not a report" in refused(capsys, folder, "--output", path)
    assert (tmp_path / "thesis.html").read_text() == "mine"
    assert "page.html: cannot be written (No such file" in refused(capsys, folder, "--output", "absent/page.html")


def test_watching_ends_with_the_run_and_the_last_page_is_still(folder, monkeypatch, capsys):
    at_work, pages = iter([True, True, False, False, True]), []
    original = runs.read_reported_run

    def pause(seconds):
        pages.append((seconds, "http-equiv=refresh" in (folder / "report.html").read_text()))
        if len(pages) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(runs, "read_reported_run", lambda path: replace(original(path), is_at_work=next(at_work, True)))
    monkeypatch.setattr(report.time, "sleep", pause)
    for _ in range(2):  # the second time it is ended by Ctrl-C
        assert main(["report", str(folder), "--watch", "2"]) == 0
        assert "http-equiv=refresh" not in (folder / "report.html").read_text()
        assert "written every 2 s" in capsys.readouterr().out
    assert pages == [(2.0, True)] * 3


def test_watch_takes_seconds(folder, capsys):
    for word in ("run", "0", "nan"):
        with pytest.raises(SystemExit) as left:
            main(["report", "run", "--watch", word])
        assert left.value.code == 2 and "seconds" in capsys.readouterr().err
