"""``kit plan`` as a user types it."""

import json
import re
import shlex
import subprocess
import sys

import pytest
from helpers import ROOT

from kit.cli.main import main
from kit.config.command_line import read_command_line
from kit.tools.plan import request


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(request, "this_machine", lambda: None)


def printed(capsys, words):
    assert main(["plan", *words.split()]) == 0
    return capsys.readouterr().out


def test_a_recipe_is_planned_for_given_gpus(capsys):
    text = printed(capsys, "--recipe llama-8b-qlora --gpu 24GiB --gpus 2")
    assert "2 x 24GiB" in text and "  yes  " in text and "  no  " in text
    assert "Recommended configuration: qlora with ddp" in text and "not measured" in text
    assert re.search(r"^    accelerate launch recipes/finetune.py --config ddp --recipe llama-8b-qlora", text, re.M)
    assert "Nothing fits" in printed(capsys, "--model llama-70b --gpu 8GiB")


def test_the_printed_command_is_accepted_with_another_method_than_the_recipe_names(capsys):
    text = printed(capsys, "--recipe llama-8b-full --gpu rtx4090")
    (words,) = re.findall(r"^    accelerate launch recipes/finetune.py (.*)", text, re.M)
    request = read_command_line(shlex.split(words))
    assert request.problems == [] and request.recipe.method == "lora"


def test_rows_that_fit_no_gpu_are_shared(capsys):
    words = "--recipe llama-8b-lora --gpu rtx4090 --gpus 8 --max_length 131072 --global_batch_size 8"
    text = printed(capsys, words)
    assert re.search(r"--sequence_parallel_size \d", text) and "sequence parallel " in text
    longest = [
        int(each.replace(",", ""))
        for each in re.findall(r"([\d,]+)(?: tokens; | with)", text.split("longest sequence")[1])
    ]
    assert len(longest) == 4 and 1.8 < longest[-1] / longest[-2] < 2.2, text
    assert main(["plan", *words.split(), "--sequence_parallel_size", "3"]) == 2
    assert "3, of 8 GPUs and 32 attention heads; expected one of 1, 2, 4, 8" in capsys.readouterr().err
    assert main(["plan", *words.replace("_size 8", "_size 1").split()]) == 2
    assert "expected a multiple of 8\n    -> or --sequence_parallel_size N" in capsys.readouterr().err
    windows = "--model gemma-3-1b --gpu h100 --gpus 2 --global_batch_size 8"
    assert "longest sequence" not in printed(capsys, windows)
    assert main(["plan", *windows.split(), "--sequence_parallel_size", "2"]) == 2
    assert "2, but this model does not support sequence parallelism" in capsys.readouterr().err


@pytest.mark.slow
def test_data_given_as_a_flag_are_counted(capsys, tmp_path):
    words = f"--model {ROOT}/recipes/tiny/model --gpu h100 --max_length 256"
    text = printed(capsys, f"{words} --dataset {ROOT}/recipes/tiny/train.jsonl")
    assert "data: 2,000 samples, " in text and "supervised: " in text
    row = {"prompt": "Name a colour.", "chosen": "Blue is one.", "rejected": "No. " * 20}
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row | {"prompt": f"{i}"}) + "\n" for i in range(64)))
    text = printed(capsys, f"{words} --dataset {tmp_path}/pairs.jsonl --objective dpo --method full")
    assert "data: 64 samples" in text and "pass before" in text
    assert main(["plan", *words.split(), "--dataset", "none.jsonl"]) == 2
    assert "no file or folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_needs_no_torch():
    code = (
        "import sys; from kit.cli.main import main;"
        "main(['plan', '--model', 'meta-llama/Llama-3.1-8B', '--gpu', 'h100', '--gpus', '8']);"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
