"""``kit plan`` as a user types it."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from helpers import ROOT

from kit.cli.main import main
from kit.tools.plan import ask
from kit.tools.plan.hardware import GPUS


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(ask, "this_machine", lambda: None)


def printed(capsys, words):
    assert main(["plan", *words.split()]) == 0
    return capsys.readouterr().out


def test_a_recipe_is_planned_for_given_gpus(capsys):
    text = printed(capsys, "--recipe llama-8b-qlora --gpu 24GiB --gpus 2")
    assert "2 x 24GiB" in text and "  yes  " in text and "  no  " in text
    assert "Recommended: qlora with ddp" in text and "not measured" in text
    assert re.search(r"^    accelerate launch recipes/finetune.py --config ddp --recipe llama-8b-qlora", text, re.M)
    assert "Nothing fits" in printed(capsys, "--model llama-70b --gpu 8GiB")


def test_all_recipes_are_planned_for_the_usual_gpus_or_for_one(capsys):
    text = printed(capsys, "")
    assert re.search(r"^llama-70b-full +2 x offload \* +64 x fsdp \* +32 x fsdp \* +32 x fsdp \*$", text, re.M)
    text = printed(capsys, "--gpu 24GiB --gpus 1")
    assert re.search(r"^llama-8b-qlora +1 x single", text, re.M)
    assert re.search(r"^llama-70b-full +no$", text, re.M)


def test_json_says_what_fits(capsys):
    plan = json.loads(printed(capsys, "--recipe llama-8b-qlora --gpu rtx4090 --json"))
    assert plan["fits"] is True and plan["recommended"] in [way for way in plan["ways"] if way["fits"]]
    assert plan["num_parameters"] == 8_030_261_248
    assert {way["method"] for way in plan["ways"]} == {"full", "lora", "qlora"}
    assert sum(plan["recommended"]["components"].values()) == plan["recommended"]["peak"]
    assert json.loads(printed(capsys, "--recipe llama-70b-full --gpu 24GiB --json"))["fits"] is False


def test_the_table_and_the_recommendation_agree(capsys):
    text = printed(capsys, "--recipe llama-8b-lora --gpu rtx4090")
    peak = re.search(r"a GPU at its peak .*, (\S+) GiB:", text)[1]
    assert re.search(rf"^lora +single +yes +{peak} ", text, re.M)


def test_a_plan_for_this_machine_counts_its_memory(capsys, monkeypatch):
    for host, best in ((512, "full with fsdp_offload"), (64, "lora with ")):
        gpu = replace(GPUS["rtx4090"], host=host * 2**30)
        monkeypatch.setattr(ask, "this_machine", lambda gpu=gpu: (gpu, 4))
        text = printed(capsys, "--recipe llama-8b-full")
        assert f"Recommended: {best}" in text and f"host memory {host}.0 GiB" in text
    assert re.search(r"^full +fsdp_offload +no, host ", text, re.M) and "since full does not fit" in text


@pytest.mark.slow
def test_data_given_as_a_flag_are_counted(capsys, tmp_path):
    words = f"--model {ROOT}/recipes/tiny/model --gpu h100 --max_length 256"
    text = printed(capsys, f"{words} --dataset {ROOT}/recipes/tiny/train.jsonl")
    assert "data: 2,000 samples, " in text and "are padding" in text
    row = {"prompt": "Name a colour.", "chosen": "Blue is one.", "rejected": "No. " * 20}
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row | {"prompt": f"{i}"}) + "\n" for i in range(64)))
    text = printed(capsys, f"{words} --dataset {tmp_path}/pairs.jsonl --objective dpo --method full")
    assert "data: 64 samples" in text and "before the first step" in text
    assert main(["plan", *words.split(), "--dataset", "none.jsonl"]) == 2
    assert "no file or folder" in capsys.readouterr().err


def test_a_plan_of_pairs_counts_two_sequences_for_each(capsys):
    """So a micro-batch of half the pairs takes what the whole one takes of answers."""
    answers, pairs = (
        json.loads(printed(capsys, f"--recipe llama-8b-lora --gpu h100 --objective {objective} --json"))["ways"]
        for objective in ("sft", "orpo")
    )
    same = 0
    for one, two in zip(answers, pairs, strict=True):
        if one["fits"] and two["per_device_train_batch_size"] * 2 == one["per_device_train_batch_size"]:
            assert two["peak"] == one["peak"]
            same += 1
    assert same


@pytest.mark.slow
def test_a_plan_needs_no_torch():
    code = (
        "import sys; from kit.cli.main import main; main(['plan', '--gpu', 'h100', '--gpus', '8']);"
        "main(['plan', '--model', 'meta-llama/Llama-3.1-8B', '--gpu', 'h100', '--gpus', '8']);"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
