"""``kit prepare`` does what the run would do with its data, once."""

import pytest

from kit.cli.main import main


@pytest.mark.slow
def test_what_is_prepared_is_opened_by_the_run(model, capsys, monkeypatch, tmp_path):
    assert main(["prepare", *model.flags]) == 0
    printed = capsys.readouterr().out
    assert "20 samples" in printed and str(tmp_path / "cache") in printed
    monkeypatch.setattr("kit.data.samples.rows.encode_all", lambda *_: pytest.fail("tokenised again"))
    assert main(["prepare", *model.flags]) == 0


def test_a_stream_has_nothing_to_prepare(model, capsys):
    assert main(["prepare", *model.flags, "--streaming", "--max_steps", "3"]) == 2
    assert "nothing to prepare" in capsys.readouterr().err
