"""Results are reported when they are there; an exception of a check becomes one; the worst decides the exit status."""

from kit.errors import Problem, UserError
from kit.tools.doctor.result import Report, Result, ok


def report_of(*results):
    reported = []
    report = Report(reported.append)
    for result in results:
        report.add(result)
    assert reported == report.results
    return report


def test_only_a_failed_check_ends_with_status_2_and_the_end_is_a_count(capsys):
    report = report_of(ok("disk", "free"), Result("port", "warn", "taken", "another"))
    assert report.end() == 0
    assert capsys.readouterr().out == "2 checks in 0 s: 1 ok, 1 warn, 0 fail\n"
    assert report_of(ok("disk", "free"), Result("disk", "fail", "found")).exit_status == 2


def test_what_a_check_raises_is_a_failed_check_with_its_name_and_words():
    def broken():
        raise OSError("\nlibcuda.so.1: cannot open\nmore")

    def refused():
        raise UserError(Problem("model", "no such folder", "a folder", "give one"), Problem("data", "gone", fix="x"))

    report = report_of()
    assert report.run("driver", broken).found == "OSError: libcuda.so.1: cannot open"
    result = report.run("model", refused)
    assert result == Result("model", "fail", "model: no such folder; expected a folder; data: gone", "give one; x")
    assert [result.name for result in report.results] == ["driver", "model"] and report.exit_status == 2


def test_a_credential_is_not_reported(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    assert "secret" not in str(report_of(Result("data", "fail", "hf_secretsecret was refused")).results[0])
