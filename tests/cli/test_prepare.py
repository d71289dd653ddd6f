"""``kit prepare`` does what the run would do with its data, once."""

import pytest
from data_helpers import write

from kit.cli.main import main


@pytest.mark.slow
def test_prepare_prints_the_notes_of_the_run_and_whether_it_had_to_tokenise(
    model_folder, chat_file, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))
    flags = ["--model_name_or_path", str(model_folder), "--dataset", str(chat_file), "--max_length", "256"]

    def printed(*more):
        assert main(["prepare", *flags, *more]) == 0
        return capsys.readouterr().out

    cache = f"cache: {tmp_path / 'cache'}"
    out = printed()
    assert "padding: " in out and f"{cache}, 1 data set tokenised\n" in out
    assert f"{cache}, nothing to do: all is there\n" in printed()
    out = printed("--packing", "--eval_dataset", str(chat_file), "--max_eval_samples", "3")
    assert "packing: " in out and f"{cache}, nothing to do: all is there\n" in out
    assert f"{cache}, 1 data set tokenised\n" in printed("--train_on", "last")


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


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "other"), [("dpo", "orpo"), ("kto", "kto")])
def test_preferences_are_prepared_for_every_objective_that_learns_from_them(objective, other, model, tmp_path, capsys):
    prompts = [f"Question {i}:" for i in range(20)]
    pairs = [{"prompt": prompt, "chosen": " yes", "rejected": " no"} for prompt in prompts]
    rated = [{"prompt": prompt, "completion": " yes", "label": bool(i % 2)} for i, prompt in enumerate(prompts)]
    write(tmp_path / "train.jsonl", *(rated if objective == "kto" else pairs))
    assert main(["prepare", *model.flags, "--objective", objective]) == 0
    assert "20 samples" in (out := capsys.readouterr().out) and "1 data set tokenised\n" in out
    assert main(["prepare", *model.flags, "--objective", other]) == 0
    assert "nothing to do: all is there" in capsys.readouterr().out
