"""The command line of ``kit plan``: its own flags beside those of a recipe."""

import json

import pytest

from kit.errors import UserError
from kit.tools.plan import ask
from kit.tools.plan.ask import read_ask
from kit.tools.plan.hardware import GPUS, Gpu


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(ask, "this_machine", lambda: None)


def refused(*words):
    with pytest.raises(UserError) as error:
        read_ask(list(words))
    return str(error.value)


def test_flags_of_the_recipe_are_those_of_a_run():
    found = read_ask(["--recipe", "llama-8b-lora", "--gpu", "h100", "--max-length=512", "--lora_r", "8", "--packing"])
    (question,) = found.questions
    own = found.workload(question)
    assert (own.length, own.lora_r, own.packing, own.method) == (512, 8, True, "lora")
    assert found.gpu is GPUS["h100"] and found.num_gpus == 1
    assert question.recipe_name == "llama-8b-lora" and set(question.typed) == {"max_length", "lora_r", "packing"}


def test_a_model_without_a_recipe_has_the_defaults_and_its_hub_id():
    (question,) = read_ask(["--model", "llama-8b", "--gpu", "24GiB"]).questions
    assert question.recipe.model_name_or_path == "meta-llama/Llama-3.1-8B" and question.recipe_name is None
    (question,) = read_ask(["--params", "8B", "--gpu", "24GiB"]).questions
    assert question.shape.num_parameters == pytest.approx(8e9, rel=0.05)


def test_a_model_may_replace_that_of_a_recipe():
    (question,) = read_ask(["--recipe", "llama-8b-lora", "--model", "qwen3-8b", "--gpu", "h100"]).questions
    assert question.shape.name == "qwen3-8b" and "model_name_or_path" in question.typed


def test_without_a_model_all_recipes_are_planned():
    found = read_ask([])
    assert len(found.questions) > 10 and found.gpu is None and found.num_gpus is None
    sizes = [question.shape.num_parameters for question in found.questions]
    assert sizes == sorted(sizes)


def test_gpus_are_this_machines_unless_they_are_named(monkeypatch):
    monkeypatch.setattr(ask, "this_machine", lambda: (Gpu(name="X", memory=2**34), 4))
    found = read_ask(["--recipe", "llama-1b-lora"])
    assert (found.gpu.name, found.num_gpus, found.gpus_per_machine) == ("X", 4, 4)
    found = read_ask(["--recipe", "llama-1b-lora", "--gpus", "2x8", "--gpu", "h100"])
    assert (found.num_gpus, found.gpus_per_machine) == (16, 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model llama-8b --params 8B", "--params: given with --model"),
        ("--model llama-8b --model_name_or_path x", "--model: given with --model_name_or_path"),
        ("--model llama-8b --gpu 24", "a memory without a unit"),
        ("--model llama-8b --gpus 0", "no GPU"),
        ("--model llama-8b --gpu h100 --gpu a100", "given twice"),
        ("--model llama-8b --gpu", "--gpu: no value"),
        ("--model llama-8b --json=yes", "--json: found 'yes'; expected no value"),
        ("--model llama-8b --price -1", "--price: found '-1'"),
        ("--model llama-8b --price nan", "--price: found 'nan'"),
        ("--model llama-8b --gpu h100 --gpus 2 --config single", "single with 2 GPUs"),
        ("--model llama-8b --gpu h100 --config fsdp", "fsdp with 1 GPU"),
        ("--model llama-8b --gpu h100 --gpus 8 --config fsdp1", "--config: found 'fsdp1'"),
        ("--model llama-8b --gpu h100 --gpus 8 --config fsdp_hybrid", "fsdp_hybrid with 8 GPUs, 8 in a machine"),
        (
            "--recipe llama-8b-full --gpu h100 --gpus 2x1 --config fsdp_hybrid",
            "2 GPUs, 1 in a machine; expected several",
        ),
        ("--recipe llama-8b-full --gpu h100 --gpus 3", "on 3 GPUs"),
        ("--model llama-2-7b --max_length 9999", "9999 tokens, llama-2-7b has 4096 positions"),
        ("--model llama-8b --use_dora true", "use_dora: the formulas do not know what it takes"),
        ("--model llama-8b --learning_rat 1", "did you mean 'learning_rate'?"),
        ("--max_length 512", "--max_length: for which model? none is named"),
        ("--recipe nope", "no recipe 'nope'"),
        ("llama-8b", "a recipe without a flag\n    -> --recipe llama-8b"),
        ("--model nobody/nothing", "its config.json is not in the cache"),
    ],
)
def test_what_cannot_be_planned_is_reported(words, message):
    assert message in refused(*words.split())


def test_mistakes_of_several_flags_are_reported_together():
    text = refused(*"--model nope --gpu h100 --max_length many --config fsdp1".split())
    assert "no model 'nope'" in text and "max_length" in text and "fsdp1" in text


def test_a_config_is_taken_by_its_name():
    for config in ("fsdp", "fsdp_hybrid", "fsdp_hybrid.yaml"):
        (question,) = read_ask(f"--recipe llama-8b-full --gpu h100 --gpus 2x8 --config {config}".split()).questions
        assert question.only == config.removesuffix(".yaml")


def test_an_existing_file_is_never_overwritten(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    assert "exists" in refused("--model", "llama-8b", "--gpu", "h100", "--write", str(file))


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--num_gpus", "4"], "--gpus 4 instead of --num_gpus"),
        (["--nodes", "2"], "--gpus 2x8 instead of --nodes"),
        (["--num-nodes=3"], "--gpus 2x8 instead of --num_nodes"),
        (["--gpu_type"], "--gpu instead of --gpu_type"),
    ],
)
def test_words_for_gpus_are_answered_with_the_flags_of_the_plan(words, fix):
    with pytest.raises(UserError) as error:
        read_ask(["--recipe", "llama-8b-lora", *words])
    assert [problem.fix for problem in error.value.problems] == [fix]


def test_the_number_of_processes_of_a_run_is_the_number_of_gpus_of_its_plan():
    assert read_ask(["--recipe", "llama-8b-lora", "--gpu", "h100", "--num_processes", "4"]).num_gpus == 4


def test_an_adapter_is_planned_with_its_base_and_its_rank(tmp_path):
    (tmp_path / "adapter").mkdir()
    config = {"base_model_name_or_path": "meta-llama/Llama-3.1-8B", "r": 64, "target_modules": ["q_proj", "v_proj"]}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    for flag in ("model", "model_name_or_path", "adapter_name_or_path"):
        (question,) = read_ask([f"--{flag}", str(tmp_path / "adapter"), "--gpu", "h100"]).questions
        assert question.shape.num_layers == 32
        assert (question.recipe.lora_r, question.recipe.lora_target_modules) == (64, ["q_proj", "v_proj"])
        assert {"model_name_or_path", "adapter_name_or_path"} <= set(question.typed)
