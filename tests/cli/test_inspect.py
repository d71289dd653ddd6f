"""``kit inspect`` shows samples, writes a page, and reports mistakes with status 2."""

import pytest

from kit.cli.main import main

OWN = """
def price(item: str):
    \"\"\"Look up a price.

    Args:
        item: Its name.
    \"\"\"

def nothing():
    pass
"""


@pytest.mark.slow
def test_the_command_prints_and_writes_a_page(model, tmp_path, capsys):
    assert main(["inspect", *model.flags, "-n", "2", "--packing", "true", "--html", "out.html"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("--- train.jsonl:") == 2 and "page: out.html" in printed and "[[Answer 0" in printed
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")
    grpo = "--objective grpo --rewards exact_match --max_new_tokens 4 --excess_length_strategy drop".split()
    assert main(["inspect", *model.flags, *grpo]) == 0 and " of them in answers (" in capsys.readouterr().out
    assert main(["inspect", *model.flags, "-n", "0"]) == 0 and "--- train.jsonl:" not in capsys.readouterr().out


@pytest.mark.slow
def test_prompts_list_the_tools_of_the_run(model, tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    grpo = "--objective grpo --rewards exact_match --max_new_tokens 4 --chat_template chatml".split()
    assert main(["inspect", *model.flags, *grpo, "--tools", "own.py:price", "-n", "1"]) == 0
    assert '"description": "Look up a price."' in capsys.readouterr().out
    for name, said in (("other", "own.py has no function 'other'"), ("nothing", "own.py:9: nothing: Cannot generate")):
        assert main(["inspect", *model.flags, *grpo, "--tools", f"own.py:{name}"]) == 2
        printed = capsys.readouterr().err
        assert said in printed and "Traceback" not in printed
