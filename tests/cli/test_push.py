"""``kit push`` reads its words, and can say them again."""

import shlex

from kit.cli.push import Asked, run


def test_the_command_that_messages_name_is_the_one_that_was_typed(monkeypatch):
    asked = []
    monkeypatch.setattr("kit.tools.push.push", asked.append)
    typed = "kit push 'my run' lab/x --public --with_run --base_model some/base --dry_run"
    run(shlex.split(typed)[2:])
    assert asked == [Asked("my run", "lab/x", True, True, "some/base", True)]
    assert asked[0].again() == typed
    assert asked[0].again(name="me/y", public=False, dry_run=False) == (
        "kit push 'my run' me/y --with_run --base_model some/base"
    )
