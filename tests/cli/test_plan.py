"""``kit plan`` as a user types it."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml
from helpers import ROOT

from kit.cli.main import main
from kit.config.command_line import read_command_line
from kit.config.recipe import ACCELERATE_CONFIGS
from kit.config.recipe_file import find_file
from kit.config.validation import load_recipe
from kit.strategy.accelerate_config import read_config
from kit.tools.plan import ask
from kit.tools.plan.hardware import GPUS


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(ask, "this_machine", lambda: None)


def on_this_machine(monkeypatch, gpu, num, host):
    monkeypatch.setattr(ask, "this_machine", lambda: (replace(GPUS[gpu], host=host), num))


def printed(capsys, words):
    assert main(["plan", *words.split()]) == 0
    return capsys.readouterr().out


def test_a_recipe_is_planned_for_given_gpus(capsys):
    text = printed(capsys, "--recipe llama-8b-qlora --gpu 24GiB --gpus 2")
    assert "2 x 24GiB" in text and "  yes  " in text and "  no  " in text
    assert "Recommended: qlora with ddp" in text and "not measured" in text
    assert re.search(r"^    accelerate launch recipes/finetune.py --config ddp --recipe llama-8b-qlora", text, re.M)


def test_all_recipes_are_planned_for_the_usual_gpus_where_there_is_none(capsys):
    text = printed(capsys, "")
    assert text.startswith("No GPU here") and "llama-70b-full" in text and "H100" in text
    assert re.search(r"^llama-70b-full +2 x offload \* +64 x fsdp \* +32 x fsdp \* +32 x fsdp \*$", text, re.M)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--gpu 24GiB --gpus 512",
        "--recipe llama-8b-full --gpu h100 --gpus 64x8 --global_batch_size 4096 --explain --price 1234.5",
        "--recipe qwen3-32b-full --gpu rtx4090 --gpus 8 --explain",
        "--model {long} --gpu h100 --gpus 2x8 --max_length 128 --explain --dataset_columns a=prompt,b=completion",
        "--model llama-70b --gpu 8GiB",
    ],
)
def test_every_line_fits_a_terminal_of_100_columns(words, capsys, monkeypatch, tmp_path):
    long = "a-model-with-a-long-name-" + "x" * 35
    shutil.copytree(ROOT / "recipes/tiny/model", tmp_path / long)
    monkeypatch.chdir(tmp_path)
    assert [line for line in printed(capsys, words.format(long=long)).splitlines() if len(line) > 100] == []


def test_all_recipes_are_planned_for_one_gpu(capsys):
    text = printed(capsys, "--gpu 24GiB --gpus 1")
    assert re.search(r"^llama-8b-qlora +1 x single", text, re.M)
    assert re.search(r"^llama-70b-full +no, .* missing$", text, re.M)


def test_json_says_what_fits(capsys):
    plan = json.loads(printed(capsys, "--recipe llama-8b-qlora --gpu rtx4090 --json"))
    assert plan["fits"] is True and plan["recommended"]["fits"] is True
    assert plan["num_parameters"] == 8_030_261_248
    assert {way["method"] for way in plan["ways"]} == {"full", "lora", "qlora"}
    assert sum(plan["recommended"]["components"].values()) == plan["recommended"]["peak"]
    assert json.loads(printed(capsys, "--recipe llama-70b-full --gpu 24GiB --json"))["fits"] is False
    assert all("fits" in entry for entry in json.loads(printed(capsys, "--json")))


def test_the_table_and_the_recommendation_agree(capsys):
    text = printed(capsys, "--recipe llama-8b-lora --gpu rtx4090")
    peak = re.search(r"a GPU at its peak .*, (\S+) GiB:", text)[1]
    assert re.search(rf"^lora +single +yes +{peak} +[\d.]+ +2  on ", text, re.M)
    plan = json.loads(printed(capsys, "--recipe llama-8b-lora --gpu 24GiB --gpus 2 --json"))
    assert plan["fits"] and plan["recommended"] in [way for way in plan["ways"] if way["fits"]]


def test_hybrid_sharding_is_a_way_on_several_machines(capsys):
    text = printed(capsys, "--recipe llama-8b-full --gpu h100 --gpus 4x8 --config fsdp_hybrid --global_batch_size 512")
    assert "Recommended: full with fsdp_hybrid: " in text and re.search(r"^full +fsdp_hybrid +yes ", text, re.M)
    assert "--config fsdp_hybrid --recipe llama-8b-full" in text and "--num_processes 32 " in text
    assert "On 4 machines: " in text and "parallelism_config_dp_replicate_size: 4, num_machines: 4" in text
    plan = json.loads(printed(capsys, "--recipe llama-8b-full --gpu h100 --gpus 2x8 --json"))
    assert [way["num_replicas"] for way in plan["ways"] if way["config"] == "fsdp_hybrid"] == [2, 2, 2]
    assert plan["on_machines"].startswith("On 2 machines: ")


def test_a_plan_for_this_machine_counts_its_memory(capsys, monkeypatch):
    on_this_machine(monkeypatch, "rtx4090", 4, 512 * 2**30)
    text = printed(capsys, "--recipe llama-8b-full")
    assert (
        "Recommended: full with fsdp_offload" in text and "4 x RTX 4090, 23.6 GiB each, host memory 512.0 GiB" in text
    )
    on_this_machine(monkeypatch, "rtx4090", 4, 64 * 2**30)
    text = printed(capsys, "--recipe llama-8b-full")
    assert re.search(r"^full +fsdp_offload +no, host ", text, re.M)
    assert "Recommended: lora with " in text
    assert json.loads(printed(capsys, "--recipe llama-8b-full --json"))["host"] == 64 * 2**30
    on_this_machine(monkeypatch, "rtx4090", 1, 3 * 2**30)
    text = printed(capsys, "--recipe llama-1b-lora")
    assert "host memory is what is missing. --async_save false" in text and "smaller --max_length" not in text
    assert "no, host too small" in printed(capsys, "")
    assert "host memory" not in printed(capsys, "--recipe llama-1b-lora --gpu rtx4090").split("Recommended")[0]


def test_a_config_that_cannot_run_the_recipe_is_reported(capsys):
    for words, message in (
        (
            "--recipe llama-8b-full --optim adamw_8bit --config fsdp",
            "fsdp with full and adamw_8bit; expected ddp",
        ),
        ("--recipe llama-8b-qlora --config fsdp_offload", "expected ddp or fsdp"),
    ):
        assert main(["plan", *f"{words} --gpu h100 --gpus 8".split()]) == 2
        assert message in capsys.readouterr().err
    assert main("plan --recipe llama-8b-lora --config ddp".split()) == 2
    assert "--config: for which GPU?" in capsys.readouterr().err


def test_the_plan_says_that_nothing_fits(capsys):
    text = printed(capsys, "--model llama-70b --gpu 8GiB")
    assert "Nothing fits" in text and "accelerate launch" not in text
    less = "--optim adamw_bf16 takes less"
    assert less not in text and less in printed(capsys, "--model llama-8b --method full --gpu 24GiB")
    assert less not in printed(capsys, "--model llama-1b --method full --gpu h100")


def test_the_recommended_recipe_is_written_and_runs(capsys, tmp_path):
    file = tmp_path / "mine.yaml"
    text = printed(capsys, f"--recipe llama-8b-lora --gpu 24GiB --max_length 1024 --write {file}")
    recipe = load_recipe(str(file))
    assert recipe.max_length == 1024 and recipe.method == "lora"
    assert ("--gradient_checkpointing true" in text) == recipe.gradient_checkpointing
    assert yaml.safe_load(file.read_text())["dataset"] == "trl-lib/Capybara"
    assert main(["plan", "--recipe", "llama-8b-lora", "--gpu", "24GiB", "--write", str(file)]) == 2


def test_what_needs_a_gpu_says_so(capsys):
    assert main(["plan", "--recipe", "llama-8b-lora", "--explain"]) == 2
    assert "--explain: for which GPU?" in capsys.readouterr().err


@pytest.mark.slow
def test_data_given_as_a_flag_are_counted(capsys):
    words = f"--model {ROOT}/recipes/tiny/model --gpu h100 --max_length 256 --dataset {ROOT}/recipes/tiny/train.jsonl"
    text = printed(capsys, words)
    assert "data: 2,000 samples of " in text and "are padding" in text and "without padding" in text
    plan = json.loads(printed(capsys, f"{words} --packing --json"))
    assert plan["data"]["padding"] < 0.05 and plan["seconds_per_step_of_data"][0] > 0
    assert main(["plan", *words.replace("train.jsonl", "none.jsonl").split()]) == 2
    assert "no file or folder" in capsys.readouterr().err


def test_a_plan_of_pairs_counts_two_sequences_for_each(capsys):
    answers, pairs = (
        json.loads(printed(capsys, f"--recipe llama-8b-lora --gpu h100 --objective {objective} --json"))["ways"]
        for objective in ("sft", "orpo")
    )
    for of_answers, of_pairs in zip(answers, pairs, strict=True):
        if (
            of_answers["fits"]
            and of_pairs["per_device_train_batch_size"] * 2 == of_answers["per_device_train_batch_size"]
        ):
            assert of_pairs["peak"] == of_answers["peak"]
    assert any(way["peak"] == other["peak"] for way, other in zip(answers, pairs, strict=True) if way["fits"])
    dpo = json.loads(printed(capsys, "--recipe llama-8b-lora --gpu h100 --objective dpo --json"))["recommended"]
    assert dpo["passes_without_gradients"] == 1 and 0.2 < dpo["passes_share"] < 0.4
    text = printed(capsys, "--recipe llama-8b-lora --gpu h100 --objective kto")
    assert "in 3 passes without gradients: the reference's" in text and "--objective kto" in text


@pytest.mark.slow
def test_pairs_given_as_a_flag_are_counted(capsys, tmp_path):
    row = {"prompt": "Name a colour.", "chosen": "Blue is one.", "rejected": "No. " * 20}
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row | {"prompt": f"{i}"}) + "\n" for i in range(64)))
    words = f"--model {ROOT}/recipes/tiny/model --gpu h100 --max_length 128 --dataset {tmp_path}/pairs.jsonl"
    text = printed(capsys, f"{words} --objective dpo --method full")
    assert "data: 64 pairs of two sequences of " in text and "before the first step: " in text
    plan = json.loads(printed(capsys, f"{words} --objective dpo --packing --json"))
    assert plan["data"]["longest"] > 2 * plan["data"]["shortest"] and plan["seconds_per_step_of_data"][0] > 0


def test_help_lists_every_flag(capsys):
    text = printed(capsys, "--help")
    assert all(f"--{flag}" in text for flag in ("model", "params", "gpu", "gpus", "price", "write", "json", "explain"))


@pytest.mark.slow
def test_a_plan_of_all_recipes_needs_no_torch():
    code = (
        "import sys; from kit.cli.main import main; main(['plan', '--gpu', 'h100', '--gpus', '8']);"
        "main(['plan', '--model', 'meta-llama/Llama-3.1-8B', '--gpu', 'h100', '--gpus', '8', '--explain']);"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_each_command_that_a_plan_prints_is_one_that_the_script_takes(capsys, tmp_path, monkeypatch):
    """With each flag once, a recipe and a config that exist, and in float32 the config that the plan makes."""
    (tmp_path / "adapter").mkdir()
    config = {"base_model_name_or_path": str(ROOT / "recipes/tiny/model"), "r": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    tiny = ["--max_length", "128"]
    whats = [
        ["--recipe", "llama-8b-lora"],
        ["--recipe", "llama-8b", "--model_name_or_path", "Qwen/Qwen2.5-7B", "--method", "qlora"],
        ["--recipe", "llama-3b-full", "--model", "llama-8b", "--learning_rate", "1e-5"],
        ["--model", "qwen2.5-7b", "--lora_target_modules", "q_proj,v_proj", "--optim", "adamw_8bit"],
        ["--model_name_or_path", "meta-llama/Llama-3.1-8B", "--method", "qlora"],
        ["--model_name_or_path", str(tmp_path / "adapter"), *tiny],
        ["--adapter_name_or_path", str(tmp_path / "adapter"), *tiny],
        ["--params", "3B"],
    ]
    wheres = [
        ["--gpu", "h100"],
        ["--gpu", "h100", "--gpus", "2x8"],
        ["--gpu", "t4"],
        ["--gpu", "v100-32", "--gpus", "8"],
    ]
    commands = set()
    for what in whats:
        for where in wheres:
            assert main(["plan", *what, *where, "--json"]) == 0, (what, where)
            plan = json.loads(capsys.readouterr().out)
            if plan["command"] is None:
                continue
            commands.add(plan["command"])
            words = shlex.split(plan["command"])
            words = words[words.index("recipes/finetune.py") + 1 :]
            names = [word for word in words if word.startswith("--")]
            assert len(names) == len(set(names)), plan["command"]
            request = read_command_line(words)
            assert not request.problems, plan["command"]
            if (request.launch.config or "").endswith("-float32.yaml"):
                monkeypatch.chdir(tmp_path)
                made = plan["on_machines"].partition("float32:")[2].strip()
                subprocess.run(
                    made.replace("accelerate_configs", str(ROOT / "accelerate_configs")), shell=True, check=True
                )
            if request.launch.config:
                file = find_file(request.launch.config, ACCELERATE_CONFIGS, "config")
                assert read_config(file).mixed_precision == ("bf16" if "h100" in where else "no")
            else:  # in float32 a single process needs no config, and no shipped one fits
                assert "t4" in where and "--mixed_precision no --num_processes 1 recipes" in plan["command"]
            monkeypatch.chdir(ROOT)
    assert len(commands) > 16
