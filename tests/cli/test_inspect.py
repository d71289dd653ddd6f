"""``kit inspect`` shows samples, writes a page, and reports mistakes with status 2."""

import pytest

from kit.cli.main import main


@pytest.mark.slow
def test_the_command_prints_and_writes_a_page(model, tmp_path, capsys):
    assert main(["inspect", *model.flags, "-n", "2", "--packing", "true", "--html", "out.html"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("--- train.jsonl:") == 2 and "page: out.html" in printed and "[[Answer 0" in printed
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")
    grpo = "--objective grpo --rewards exact_match --max_new_tokens 4 --excess_length_strategy drop".split()
    assert main(["inspect", *model.flags, *grpo]) == 0 and " of them in answers (" in capsys.readouterr().out
    assert main(["inspect", *model.flags, "-n", "0"]) == 0 and "--- train.jsonl:" not in capsys.readouterr().out
