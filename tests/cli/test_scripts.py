"""``kit train``, ``kit score``, ``kit sample`` and ``kit export`` are the scripts, started from anywhere."""

import os
import subprocess
import sys

from helpers import ROOT

from kit.cli.main import main


def test_kit_becomes_the_script_with_its_words_in_the_same_process(monkeypatch):
    """So signals, exit statuses and the start of several processes are those of the script."""
    made = []
    monkeypatch.setattr(os, "execve", lambda *words: made.append(words))
    for command, script in (
        ("train", "finetune.py"),
        ("score", "score.py"),
        ("sample", "sample.py"),
        ("export", "export.py"),
    ):
        main([command, "--config", "ddp", "a b"])
        program, words, environment = made.pop(0)
        assert program == words[0] == sys.executable
        assert words[1:] == [str(ROOT / "recipes" / script), "--config", "ddp", "a b"]
        assert set(os.environ.items()) <= set(environment.items())
        made.clear()


def test_kit_train_anywhere_answers_as_the_script_does(tmp_path):
    def answer(*words):
        result = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
        return result.returncode, result.stdout, result.stderr

    wrong = ["--learning_rte", "1"]
    kit = answer("-m", "kit.cli.main", "train", *wrong)
    assert kit == answer(str(ROOT / "recipes/finetune.py"), *wrong) and kit[0] == 2
    status, text, _ = answer("-m", "kit.cli.main", "train", "--help")
    assert status == 0 and text.startswith("usage: kit train [--config C]")
