"""``kit inspect`` shows samples, writes a page, and reports mistakes with status 2."""

import pytest

from kit.cli.main import main


@pytest.mark.slow
def test_the_command_prints_and_writes_a_page(model, tmp_path, capsys):
    assert main(["inspect", *model.flags, "-n", "2", "--packing", "true", "--html", "out.html"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("--- train.jsonl:") == 2 and "page: out.html" in printed and "[[Answer 0" in printed
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")
    assert main(["inspect", *model.flags, "-n", "0"]) == 0 and "--- train.jsonl:" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_mistake_is_reported_with_status_2(model, capsys):
    assert main(["inspect", *model.flags, "--html", "nowhere/out.html"]) == 2
    assert "nowhere/out.html: cannot be written (No such file or directory)" in capsys.readouterr().err


def test_what_a_run_would_refuse_is_refused_before_any_data_is_read(model_folder, chat_file, capsys):
    right = ["--model_name_or_path", str(model_folder), "--dataset", str(chat_file)]
    wrong = ["--max_length", "9999", "--lora_target_modules", "q_porj"]
    assert main(["inspect", *right, *wrong]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: 2 problems")
    for message in ("max_length: 9999 tokens, the model has 1024 positions", "'q_porj'"):
        assert message in err
    # What the files show comes first, because it is known without opening the model.
    assert main(["inspect", *right, *wrong, "--eval_dataset", "nowhere.jsonl"]) == 2
    assert capsys.readouterr().err.startswith("error: eval_dataset: no file or folder 'nowhere.jsonl'")
