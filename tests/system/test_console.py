"""Only the main process prints, without credentials, and continues after its output is closed."""

import ast
import os
import re
import subprocess
import sys
import warnings

import pytest
from helpers import ROOT

from kit.system import console
from kit.system.visible import joined

HOSTILE = "a\x1b[2Jb\nerror: forged"
SHOWN = r"a\x1b[2Jb\nerror: forged"
PRINTERS = {"print", "pprint", "tqdm", "print_exc", "print_exception", "print_stack", "ArgumentParser", "displayhook"}
STREAMS = {"sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__"}
# They write nothing to them: they copy what is written, and flush.
OWN_STREAMS = ("kit/failures/exits.py",)


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


def test_no_output_moves_the_cursor_and_no_name_starts_a_line(monkeypatch, capsys):
    console.say(HOSTILE, joined(["one", HOSTILE]))
    console.show(HOSTILE)
    console.show_error(HOSTILE)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    console.announce_wait(HOSTILE)
    with pytest.raises(SystemExit) as caught:
        console.Parser(prog="p").parse_args([HOSTILE])
    assert caught.value.code == 2
    output = capsys.readouterr()
    text = SHOWN.replace(r"\n", "\n")
    assert output.out == f"{SHOWN}\none\n{SHOWN}\n{text}\n"
    assert output.err == f"{text}\n{SHOWN} ...\nusage: p [-h]\np: error: unrecognized arguments: {SHOWN}\n"


def test_long_work_is_reported_without_a_progress_bar():
    code = """
import time
from kit.system import console
console.QUIET_SECONDS = 0.1
console.report_long_work()
for item in console.progress(range(3), "evaluation", 3):
    time.sleep(3600 * item)
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        line = process.stderr.readline()
        process.kill()
    assert re.fullmatch(r"evaluation: 1 of 3, \d+ s so far\n", line)


def test_warnings_and_logs_of_libraries_are_shown_like_the_kits_own_lines():
    code = f"""
import logging, warnings
from kit.system.console import guard_libraries
guard_libraries()
logging.basicConfig(format="%(name)s: %(message)s")
logging.getLogger("x").error("%s", {HOSTILE!r})
logging.getLogger("x").error("%d of %s", 3, "https://me:password@host/a")
warnings.warn({HOSTILE!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    shown = SHOWN.replace(r"\n", "\n")
    lines = f"x: {shown}\nx: 3 of https://***@host/a\n<string>:8: UserWarning: {shown}\n"
    assert (done.returncode, done.stderr) == (0, lines)


def printing(tree):
    """Calls of functions that print, and the streams of this process but where they are only asked or flushed."""
    nodes = list(ast.walk(tree))
    asked = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in ("isatty", "flush")}
    for node in nodes:
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if called in PRINTERS:
                yield called
        elif isinstance(node, ast.Attribute) and id(node) not in asked and ast.unparse(node) in STREAMS:
            yield ast.unparse(node)


def test_no_other_module_prints():
    found = {}
    for path in [*(ROOT / "kit").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]:
        prints = set(printing(ast.parse(path.read_text(encoding="utf-8"))))
        if prints and path != ROOT / "kit/system/console.py":
            found[str(path.relative_to(ROOT))] = prints
    assert all(found.pop(path) == {"sys.stdout", "sys.stderr"} for path in OWN_STREAMS)
    assert found.pop("kit/export/llama_cpp_worker.py") == {"print"}  # a process of its own, whose output is its result
    assert found == {}


def test_characters_that_a_terminal_cannot_write_are_question_marks():
    code = "from kit.system import console\nconsole.show('caf\u00e9 \U0001f600')\nconsole.show('end')"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, cwd=ROOT, env={**os.environ, "PYTHONIOENCODING": "latin-1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, b"caf\xe9 ?\nend\n", b"")


def test_a_bar_is_shown_on_a_terminal_only(monkeypatch, capsys):
    for is_terminal in (False, True):
        monkeypatch.setattr(console.sys.stderr, "isatty", lambda shown=is_terminal: shown)
        assert list(console.progress(range(3), HOSTILE, 3)) == [0, 1, 2]
        console.bar(HOSTILE, "B", 1).close()
        assert (SHOWN in capsys.readouterr().err) is is_terminal


def test_warnings_that_no_user_can_act_on_are_hidden_and_others_are_not():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        console.silence_libraries()
        warnings.warn("`is_gradient_checkpointing` is deprecated", FutureWarning, stacklevel=1)
        warnings.warn("`gradient_checkpointing_enable` is deprecated", FutureWarning, stacklevel=1)
        warnings.warn("your disk is nearly full", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["your disk is nearly full"]
