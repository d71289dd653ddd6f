"""The ``kit`` command answers quickly, in aligned text, and refuses what it does not know."""

from kit import __version__
from kit.cli.main import COMMANDS, SCRIPTS, main


def test_help_names_the_commands_and_another_is_refused_with_a_hint(capsys):
    for argv in ([], ["--help"], ["help"]):
        assert main(argv) == 0
        text = capsys.readouterr().out
        assert [line.split()[0] for line in text.split("\n\n")[1].splitlines()] == [*SCRIPTS, *COMMANDS]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kit {__version__}\n"
    assert main(["recpies"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "did you mean 'recipes'" in err
