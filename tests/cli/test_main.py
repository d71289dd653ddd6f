"""The ``kit`` command answers quickly, in aligned text, and refuses what it does not know."""

import pytest

from kit import __version__
from kit.cli.main import ANSWERS, COMMANDS, SCRIPTS, main


def test_help_names_the_commands(capsys):
    for argv in ([], ["--help"], ["help"]):
        assert main(argv) == 0
        text = capsys.readouterr().out
        assert [line.split()[0] for line in text.split("\n\n")[1].splitlines()] == [*SCRIPTS, *COMMANDS]


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kit {__version__}\n"


def test_an_unknown_command_is_refused_with_a_hint(capsys):
    assert main(["recpies"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "did you mean 'recipes'" in err


WORDS = {
    "finetune": "kit train",
    "eval": "kit score",
    "merge_lora": "kit export",
    "generate": "kit chat",
    "serve": "docs/questions.md#the-hub-vllm-ollama-gguf",
    "upload": "kit push",
}


@pytest.mark.parametrize(("word", "answer"), WORDS.items())
def test_a_command_of_another_kit_is_answered_with_what_does_its_work(word, answer, capsys):
    assert main([word]) == 2
    err = capsys.readouterr().err
    assert answer in err and "did you mean" not in err


def test_answers_name_commands_that_exist():
    assert not set(ANSWERS) & {*SCRIPTS, *COMMANDS}
    for answer in ANSWERS.values():
        if answer.startswith("kit "):
            assert answer.split()[1] in (*SCRIPTS, *COMMANDS)
