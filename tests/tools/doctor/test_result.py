"""A result is shown when its check ends; any exception is a result; one failure decides the exit status."""

from kit.system.errors import Problem, UserError
from kit.tools.doctor.result import CheckWarning, Report


def test_each_check_is_a_line_whatever_it_raises_and_one_failure_is_status_2(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")

    def raised(error):
        raise error

    report = Report("gpu-a")
    report.check("disk", lambda: "free\x1b")
    report.check("port", lambda: raised(CheckWarning("taken", "another")))
    assert report.exit_status == 0
    report.check("driver", lambda: raised(OSError("\nlibcuda.so.1: cannot open\nmore")))
    wrong = Problem("model", "hf_secretsecret was refused", "a folder", "give one"), Problem("data", "gone")
    report.check("model", lambda: raised(UserError(*wrong)))
    assert report.end() == 2
    assert capsys.readouterr().out.splitlines() == [
        r"ok    gpu-a: disk              free\x1b",
        "warn  gpu-a: port              taken",
        "    -> another",
        "fail  gpu-a: driver            OSError: libcuda.so.1: cannot open",
        "fail  gpu-a: model             model: *** was refused; expected a folder",
        "    -> give one",
        "data: gone",
        "4 checks: 1 ok, 1 warn, 2 fail",
    ]
