"""The ``kit`` command answers quickly, in aligned text, and refuses what it does not know."""

from kit.cli.main import main


def test_help_names_the_commands(capsys):
    for argv in ([], ["--help"], ["help"]):
        assert main(argv) == 0
        assert "recipes" in capsys.readouterr().out


def test_an_unknown_command_is_refused_with_a_hint(capsys):
    assert main(["recpies"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "did you mean 'recipes'" in err
