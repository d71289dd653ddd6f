"""One process of a run speaks, without credentials, and goes on when nobody listens any more."""

import os
import subprocess
import sys
import warnings

import pytest
from helpers import ROOT

from kit import console


def test_only_the_main_process_prints(monkeypatch, capsys):
    console.say("one", "two")
    assert capsys.readouterr().out == "one\ntwo\n"
    monkeypatch.setenv("RANK", "1")
    assert console.rank() == 1 and not console.is_main()
    console.say("one", "two")
    assert capsys.readouterr().out == ""


def test_no_line_holds_a_credential(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "n0t-for-you")
    console.say("GET https://me:password@host/a with n0t-for-you")
    console.show("GET https://me:password@host/a with n0t-for-you")
    assert capsys.readouterr().out == "GET https://***@host/a with ***\n" * 2


def test_a_wait_is_announced_on_a_terminal_only(monkeypatch, capsys):
    console.announce_wait("opening")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    console.announce_wait("opening")
    assert capsys.readouterr() == ("", "opening ...\n")


def run(code, end, **env):
    """Python that begins to write when its reader has gone; what it says of itself in the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.stdin.readline()\n{code}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    end(process)
    process.stdin.write("go\n")
    process.stdin.close()
    try:
        error = process.stderr.read()
        return process.wait(60), error
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("call", ["say", "show"])
def test_a_closed_pipe_ends_nothing(call):
    code = (
        f"from kit import console\nfor size in (100_000, 1):\n    console.{call}('x' * size)\nsys.stderr.write('end')"
    )
    assert run(code, lambda process: process.stdout.close()) == (0, "end")


def test_what_a_terminal_cannot_write_is_shown_as_a_question_mark():
    code = "from kit import console\nconsole.show('caf\u00e9 \U0001f600')\nconsole.show('end')"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, cwd=ROOT, env={**os.environ, "PYTHONIOENCODING": "latin-1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, b"caf\xe9 ?\nend\n", b"")


def test_a_bar_is_shown_on_a_terminal_only(monkeypatch, capsys):
    assert list(console.progress(range(3), "reading", 3)) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(console.sys.stderr, "isatty", lambda: True)
    assert list(console.progress(range(3), "reading", 3)) == [0, 1, 2]
    assert "reading" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert list(console.progress(range(3), "reading", 3)) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_warnings_that_no_user_can_act_on_are_hidden_and_others_are_not():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        console.silence_libraries()
        warnings.warn("`is_gradient_checkpointing` is deprecated", FutureWarning, stacklevel=1)
        warnings.warn("your disk is nearly full", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["your disk is nearly full"]
