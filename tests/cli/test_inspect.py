"""``kit inspect`` shows samples, writes a page, and reports mistakes with status 2."""

import pytest
from data_helpers import write

from kit.cli.main import main


@pytest.mark.slow
def test_the_command_prints_and_writes_a_page(model, tmp_path, capsys):
    assert main(["inspect", *model.flags, "-n", "2", "--html", "out.html"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("--- train.jsonl:") == 2 and "page: out.html" in printed
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")
    assert main(["inspect", *model.flags, "-n", "1", "--show", "longest"]) == 0
    assert capsys.readouterr().out.count("--- train.jsonl:") == 1
    assert main(["inspect", *model.flags, "-n", "0"]) == 0 and "--- train.jsonl:" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--datset", "x"], "--datset: unknown flag"),
        (["-n", "-1"], "-n: found -1; expected whole number from 0"),
        (
            ["--show", "shiny"],
            "--show: shiny: no sample of these data; expected longest, shortest, least-learned, spread",
        ),
        (["--html", "nowhere/out.html"], "--html: nowhere/out.html: No such file or directory"),
        (["--streaming", "--max_steps", "3"], "streaming: a stream cannot be shown as a whole"),
        (["--max_length", "8"], "train.jsonl: none of 20 samples"),
    ],
)
def test_a_mistake_is_reported_with_status_2(flags, message, model, capsys):
    assert main(["inspect", *model.flags, *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "prepare"])
def test_what_a_run_would_refuse_is_refused_before_any_data_is_read(command, model_folder, chat_file, capsys):
    right = ["--model_name_or_path", str(model_folder), "--dataset", str(chat_file)]
    wrong = ["--max_length", "9999", "--lora_target_modules", "q_porj"]
    assert main([command, *right, *wrong]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: 2 problems")
    for message in ("max_length: 9999 tokens, the model has 1024 positions", "'q_porj'"):
        assert message in err
    # What the files show comes first, because it is known without opening the model.
    assert main([command, *right, *wrong, "--eval_dataset", "nowhere.jsonl"]) == 2
    assert capsys.readouterr().err.startswith("error: eval_dataset: no file or folder 'nowhere.jsonl'")


@pytest.mark.parametrize("command", ["inspect", "prepare"])
def test_help_says_what_it_takes(command, capsys):
    try:
        status = main([command, "--help"])
    except SystemExit as leaving:
        status = leaving.code
    assert status == 0 and "recipes/finetune.py" in capsys.readouterr().out


def preferences(kind, i):
    prompt = [{"role": "user", "content": f"Question {i}"}]
    good, bad = ([{"role": "assistant", "content": f"{word} {i}"}] for word in ("Answer", "Nonsense"))
    if kind == "pairs":
        return {"prompt": prompt, "chosen": good, "rejected": bad}
    return {"prompt": prompt, "completion": good if i % 2 else bad, "label": bool(i % 2)}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "objective"), [("pairs", "dpo"), ("pairs", "simpo"), ("rated", "kto")])
def test_pairs_and_answers_with_a_label_are_shown(kind, objective, model, tmp_path, capsys):
    write(tmp_path / "train.jsonl", *(preferences(kind, i) for i in range(20)))
    flags = [*model.flags, "--objective", objective]
    assert main(["inspect", *flags, "-n", "2", "--html", "out.html"]) == 0
    printed, page = capsys.readouterr().out, (tmp_path / "out.html").read_text()
    if kind == "pairs":
        assert printed.count("  chosen:\n") == printed.count("  rejected:\n") == 2
        assert page.count("<div class=answers>") > 2 and "--show rejected-longer" in printed
    else:
        assert "50.0% of the answers have the label true" in printed and "label true</small>" in page
        assert main(["inspect", *flags, "-n", "3", "--show", "label-false"]) == 0
        assert capsys.readouterr().out.count(", label false\n") == 3
    more = ["--method", "lora", "--streaming", "--max_steps", "3"]
    if kind == "pairs":
        assert main(["inspect", *flags, *more]) == 2
        assert "streaming: a stream cannot be shown as a whole" in capsys.readouterr().err
    assert main(["inspect", *flags, "-n", "1", "--packing", "true", "--eval_split_size", "4"]) == 0
    assert "held out" in capsys.readouterr().out
