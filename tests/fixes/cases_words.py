"""Fixes of commands, of the plan, of models' names, of adapters and of words that other kits have."""

import json

from fixes.harness import as_command, case, without_flag
from helpers import ROOT

TINY = str(ROOT / "recipes/tiny/model")
_REAL = "starts real runs: tests/cli/test_verify_resume.py"
UNTYPED = {
    "kit/cli/report.py:_write": "waits for the run: tests/cli/test_report.py",
    "kit/cli/verify_resume.py:read_options#1": _REAL,
    "kit/cli/verify_resume.py:read_options#2": _REAL,
    "kit/cli/verify_resume.py:read_options#3": _REAL,
    "kit/cli/verify_resume.py:_verify": _REAL,
    "kit/cli/convert.py:_template_file#1": "tests/cli/test_convert.py types it with the file",
    "kit/cli/convert.py:_template_file#2": "--out as in run, which has a case",
    "kit/model/adapter.py:_check_oft#1": "a model with fused experts: tests/model/test_adapter.py",
    "kit/model/adapter.py:_check_saved_adapter#2": "the flag of _check_shapes, which has a case",
    "kit/model/adapter.py:_check_saved_adapter#4": "a call in the program that made the adapter",
    "kit/model/locate.py:locate_model#1": "only the user knows the model that a GGUF file was made from",
    "kit/model/locate.py:open_adapter": "weights to convert: pickled ones are never opened",
    "kit/tools/api.py:_flag_value": "a call from Python: tests/tools/test_api.py",
    "kit/tools/convert/convert.py:convert": "kit export makes a model of a checkpoint: tests/export",
    "kit/tools/doctor/result.py:Report.add": "passes on the fix of a check",
}


@case("kit/cli/main.py:_unknown")
def a_command_with_a_slip(world):
    return "kit recpies"


@case("kit/cli/main.py:_unknown", edit=lambda world, problem, command: problem.fix)
def a_command_of_another_kit(world):
    return "kit finetune"


# --- kit convert


THEIRS = ("base_model: model", "sequence_len: 256", "learning_rate: 1e-4", "micro_batch_size: 1")
THEIRS = (*THEIRS, "datasets: [{path: chats.jsonl, type: chat_template}]")


def add(world, problem, command):
    """An ``edit`` that adds the flag of the fix."""
    return f"{command} {problem.fix.partition(' leaves')[0]}"


@case("kit/cli/convert.py:run#1")
def a_setting_with_a_slip(world):
    world.write("theirs.yaml", *THEIRS)
    return "kit convert theirs.yaml --max_lenth 64"


@case("kit/cli/convert.py:run#2")
def a_file_that_would_be_written_over(world):
    world.write("theirs.yaml", *THEIRS)
    return "kit convert theirs.yaml --out theirs.yaml"


@case("kit/cli/convert.py:_check_drop", edit=lambda world, problem, command: command.replace("alfa", "alpha"))
def a_key_with_a_slip(world):
    world.write("theirs.yaml", *THEIRS, "rope_alpha_of_tomorrow: 5")
    return "kit convert theirs.yaml --drop rope_alpha_of_tomorrow,rope_alfa_of_tomorrow"


@case("kit/tools/convert/convert.py:_not_dropped", edit=add)
def a_key_that_changes_what_is_learned(world):
    world.write("theirs.yaml", *THEIRS, "neftune_noise_alpha: 5", "optimizer: lion_pytorch")
    return "kit convert theirs.yaml"


@case("kit/tools/convert/convert.py:_invalid", values={"NAME": "model"})
def a_model_that_the_shell_fills_in(world):
    world.write("train.sh", "swift sft --model $1 --dataset chats.jsonl")
    return "kit convert train.sh"


@case("kit/tools/convert/shell.py:_raise_if_in_a_file", edit=lambda world, problem, command: as_command(problem.fix))
def a_script_that_names_a_file_of_settings(world):
    world.write("theirs.yaml", *THEIRS)
    world.write("train.sh", "NPROC_PER_NODE=2 swift sft --config theirs.yaml")
    return "kit convert train.sh"


@case("kit/tools/convert/convert.py:_unknown", edit=lambda world, problem, command: as_command(problem.fix))
def a_recipe_of_ours(world):
    world.write("ours.yaml", "model_name_or_path: model", "dataset: chats.jsonl", "max_length: 256")
    return "kit convert ours.yaml"


@case("kit/config/recipe_file.py:read_recipe_file", edit=lambda world, problem, command: problem.fix)
def a_file_of_another_kit(world):
    world.write("theirs.yaml", *THEIRS)
    return "finetune --recipe theirs.yaml"


# --- kit plan


def drop(flag):
    """An ``edit`` that leaves out a flag."""
    return lambda world, problem, command: " ".join(without_flag(command.split(), flag))


def keep_first(world, problem, command):
    first, flag, _ = command.rpartition(f" {problem.where}")
    assert flag
    return first


PLAN = "kit plan --recipe llama-8b-lora"


@case("kit/cli/plan.py:_show_usual")
def an_explained_plan_without_a_gpu(world):
    return f"{PLAN} --explain"


@case("kit/tools/plan/ask.py:read_ask#1", edit=drop("params"))
def a_model_and_a_number_of_parameters(world):
    return "kit plan --params 8B --model llama-8b --gpu h100"


@case("kit/tools/plan/ask.py:read_ask#2")
def a_recipe_without_its_flag(world):
    return "kit plan llama-8b"


@case("kit/tools/plan/ask.py:read_ask#2")
def a_plan_of_no_model(world):
    return "kit plan --max_length 512"


@case("kit/tools/plan/ask.py:_lacks#1")
def a_plan_of_fp8_for_a_gpu_without_it(world):
    return f"{PLAN} --gpu a100 --fp8 true"


@case("kit/tools/plan/ask.py:_lacks#2")
def a_plan_of_bf16_for_a_gpu_without_it(world):
    return "kit plan --recipe llama-8b-full --gpu t4 --optim adamw_bf16"


@case("kit/tools/plan/ask.py:_lacks#3")
def a_plan_of_flash_attention_3_for_another_gpu(world):
    return f"{PLAN} --gpu a100 --packing true --attn_implementation flash_attention_3"


@case("kit/tools/plan/ask.py:_split#1")
def the_number_of_gpus_by_another_word(world):
    return f"{PLAN} --gpu h100 --num_gpus 4"


@case("kit/tools/plan/ask.py:_split#1")
def machines(world):
    return f"{PLAN} --gpu h100 --nodes 2"


@case("kit/tools/plan/ask.py:_split#2", edit=keep_first)
def a_gpu_given_twice(world):
    return f"{PLAN} --gpu h100 --gpu a100"


@case("kit/tools/plan/ask.py:_question#1", values={"MODEL": "model"})
def data_for_a_number_of_parameters(world):
    return "kit plan --params 8B --gpu h100 --dataset chats.jsonl --max_length 256"


@case("kit/tools/plan/ask.py:_question#2")
def a_plan_of_rows_longer_than_the_model_reads(world):
    return "kit plan --model model --gpu h100 --max_length 4096"


@case("kit/tools/plan/ask.py:_question#3")
def gpus_that_do_not_divide_the_batch(world):
    return f"{PLAN} --gpu h100 --gpus 3"


@case("kit/tools/plan/ask.py:_uncovered")
def a_plan_of_dora(world):
    return f"{PLAN} --gpu h100 --use_dora true"


@case("kit/tools/plan/ask.py:_config#1")
def one_process_on_eight_gpus(world):
    return f"{PLAN} --gpu h100 --gpus 8 --config single"


@case("kit/tools/plan/ask.py:_config#1")
def copies_on_one_gpu(world):
    return f"{PLAN} --gpu h100 --config ddp"


@case("kit/tools/plan/ask.py:_config#2")
def hybrid_sharding_on_one_machine(world):
    return f"{PLAN} --gpu h100 --gpus 8 --config fsdp_hybrid"


@case("kit/tools/plan/hardware.py:parse_gpu#1")
def a_memory_without_a_unit(world):
    return f"{PLAN} --gpu 24"


@case("kit/tools/plan/hardware.py:parse_gpu#2")
def a_gpu_without_bf16_that_is_not_known(world):
    return f"{PLAN} --gpu p100"


@case("kit/tools/plan/hardware.py:parse_gpu#3")
def a_gpu_that_is_not_known(world):
    return f"{PLAN} --gpu l40"


@case("kit/tools/plan/lengths.py:read_training_data")
def data_for_a_model_without_its_tokenizer(world):
    return "kit plan --model llama-8b --gpu h100 --dataset chats.jsonl"


@case("kit/tools/plan/models.py:find_shape#1")
def a_model_whose_config_is_not_here(world):
    return "kit plan --model nobody/nothing --gpu h100"


@case("kit/tools/plan/models.py:find_shape#2")
def a_shape_with_a_slip(world):
    return "kit plan --model llama-8 --gpu h100"


# --- models and adapters

INSPECT = "kit inspect --dataset chats.jsonl --max_length 256 -n 0"


def adapter(world, name, base=TINY, **changes):
    """Write an adapter of the tiny model into the folder ``name``; ``base`` is what it names as its base."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY)
    changes |= {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}  # so that it changes the model
    config = LoraConfig(task_type="CAUSAL_LM", **changes)
    get_peft_model(model, config).save_pretrained(world.folder / name)
    file = world.folder / name / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))


@case("kit/model/locate.py:locate_model#2")
def a_file_of_a_model(world):
    return "finetune --model_name_or_path model/config.json --max_length 256"


def backticked(world, problem, command):
    return as_command(problem.fix.split("`")[1])


@case("kit/model/locate.py:locate_model#3", then="manifest", edit=backticked)
def a_checkpoint_as_a_model(world):
    world.write("runs/x/checkpoints/step-00000002/manifest.json", "{}")
    return f"{INSPECT} --model_name_or_path runs/x/checkpoints/step-00000002"


@case("kit/model/locate.py:locate_model#4")
def the_folder_of_a_run_as_a_model(world):
    (world.folder / "run").mkdir()
    (world.folder / "run/final").symlink_to(world.folder / "model")
    return "finetune --model_name_or_path run --max_length 256"


@case("kit/config/adapter_base.py:fill_in_base#1")
def the_folder_of_a_run_as_an_adapter(world):
    adapter(world, "run/final")
    return f"{INSPECT} --adapter_name_or_path run"


@case("kit/config/adapter_base.py:fill_in_base#2", then="org/adapter", values={"BASE": TINY})
def an_adapter_that_is_not_in_the_cache(world):
    return f"{INSPECT} --adapter_name_or_path org/adapter"


@case("kit/config/adapter_base.py:fill_in_base#3", values={"BASE": TINY})
def an_adapter_that_names_no_base(world):
    adapter(world, "mine", base=None)
    return f"{INSPECT} --adapter_name_or_path mine"


@case("kit/config/adapter_base.py:fill_in_base#4", values={"BASE": TINY})
def an_adapter_whose_base_is_gone(world):
    adapter(world, "mine", base="/nowhere/base")
    return f"{INSPECT} --model_name_or_path mine"


@case("kit/model/adapter.py:_check_saved_adapter#1")
def an_adapter_of_lora_as_oft(world):
    adapter(world, "mine")
    return f"finetune --model_name_or_path {TINY} --max_length 256 --adapter_name_or_path mine --adapter_type oft"


@case("kit/model/adapter.py:_check_oft#2")
def blocks_that_do_not_divide_the_inputs(world):
    return f"finetune --model_name_or_path {TINY} --max_length 256 --adapter_type oft --oft_block_size 48"


@case("kit/model/adapter.py:_check_saved_adapter#3")
def an_adapter_of_dora_with_qlora(world):
    adapter(world, "dora", use_dora=True)
    return f"finetune --model_name_or_path {TINY} --max_length 256 --adapter_name_or_path dora --method qlora"


@case("kit/model/adapter.py:_check_shapes#1", then="c_attn")
def an_adapter_for_modules_of_another_family(world):
    adapter(world, "mine")
    file = world.folder / "mine/adapter_config.json"
    other = {"target_modules": ["c_attn"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | other))
    return "finetune --adapter_name_or_path mine --max_length 256"


@case("kit/model/adapter.py:_check_shapes#2")
def an_adapter_of_another_model(world):
    adapter(world, "mine")
    return "finetune --adapter_name_or_path mine --max_length 256"


@case("kit/model/adapter.py:_check_targets#1")
def a_module_with_a_slip(world):
    return "finetune --lora_target_modules q_prj"


@case("kit/model/locate.py:base_of_adapter#1", then="adapter", values={"BASE": TINY})
def an_adapter_whose_config_is_no_json(world):
    adapter(world, "mine")
    world.write("mine/adapter_config.json", "{")
    return "export mine --output_dir merged"


@case("kit/model/locate.py:base_of_adapter#2", values={"BASE": TINY})
def an_adapter_to_merge_that_names_no_base(world):
    adapter(world, "mine", base=None)
    return "export mine --output_dir merged"


@case("kit/model/locate.py:check_base", values={"BASE": TINY})
def an_adapter_to_merge_whose_base_is_gone(world):
    adapter(world, "mine", base="/nowhere/base")
    return "export mine --output_dir merged"


@case("kit/cli/inspect.py:run", edit=drop("streaming"))
def a_stream_to_be_shown(world):
    return (
        "kit inspect --model_name_or_path model --dataset chats.jsonl --max_length 256 --max_steps 4 --streaming true"
    )
