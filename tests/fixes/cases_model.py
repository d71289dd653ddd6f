"""Fixes of the model, of what of it trains, and of its checkpoints."""

import json
import shutil

from fixes.cases_run import config, left_by
from fixes.harness import as_command, case
from helpers import ROOT, forge
from safetensors.torch import load_file, save_file

TINY = f"--model_name_or_path {ROOT / 'recipes/tiny/model'} --max_length 256"
_FAMILY = "a model of a rare family: tests/promises/test_families.py"
_LOADED = "found when weights are loaded or trained: tests/train, tests/promises/test_families.py"
_TORCHAO = "needs torchao, which CI does not install: tests/model/test_qat.py, tests/config/test_conflicts.py"
UNTYPED = {
    "kit/model/adapter.py:_check_targets#2": "a name to leave out of a list",
    "kit/model/adapter.py:_check_targets#3": _FAMILY,
    "kit/model/token_rows.py:_check_rows#1": "a name to leave out of a list",
    "kit/model/token_rows.py:_check_rows#2": _FAMILY,
    "kit/model/token_rows.py:_check_whole_modules#2": _FAMILY,
    "kit/model/dequantise.py:_unknown": "only the user knows the model that was quantised",
    "kit/model/embedding_noise.py:changed_embeddings": "of the first step: no family that is tried here does it",
    "kit/model/checkpointing.py:_Kept.__call__": _LOADED,
    "kit/model/load.py:check_model#1": "only the user knows the model that was quantised",
    "kit/model/load.py:check_model#3": _FAMILY,
    "kit/model/load.py:build_meta_model#1": "installs a package",
    "kit/model/load.py:build_meta_model#2": _FAMILY,
    "kit/model/load.py:_read_model": _LOADED,
    "kit/model/load.py:_nothing_unpickled.refuse": "weights to convert: pickled ones are never opened",
    "kit/model/locate.py:check_weight_files": "weights to convert: pickled ones are never opened",
    "kit/model/fp8_linear.py:check_fp8": "a model with such sizes: tests/model/test_fp8_linear.py",
    "kit/model/load.py:check_model#4": "only the user knows the model that was quantised",
    "kit/model/qat.py:check_qat#1": "installs a package",
    "kit/model/qat.py:check_qat#2": _TORCHAO,
    "kit/model/qat.py:check_qat#3": _TORCHAO,
    "kit/config/conflicts.py:_conflicts_of_method#8": _TORCHAO,
    "kit/config/conflicts.py:_conflicts_of_method#9": _TORCHAO,
    "kit/config/conflicts.py:_conflicts_of_method#10": _TORCHAO,
    "kit/model/parts.py:check_parts#2": _FAMILY,
    "kit/model/parts.py:check_parts#3": _FAMILY,
    "kit/model/parts.py:check_parts#4": _FAMILY,
    "kit/model/tokenizer.py:open_tokenizer": "the text of kit/model/load.py:open_config, which has a case",
    "kit/strategy/accelerator.py:check_adapter_units#1": "a model with towers: tests/strategy/test_accelerator.py",
    "kit/strategy/accelerator.py:check_strategy#2": _FAMILY,
    "kit/strategy/accelerator.py:check_strategy#3": _FAMILY,
    "kit/strategy/topology.py:check_router_loss": _FAMILY,
    "kit/train/isolation.py:check_isolation#1": _LOADED,
    "kit/train/isolation.py:check_isolation#2": _LOADED,
    "kit/train/step.py:_check_gradients": _LOADED,
    "kit/train/step.py:_no_gradient": _LOADED,
    "kit/memory/families.py:shape_of": "a model without formulas: only a run measures it",
}


# --- kit/model


@case("kit/model/load.py:check_model#2")
def rows_longer_than_the_model_reads(world):
    return "finetune --max_length 4096"


CODE = """
from transformers import PretrainedConfig

class MineConfig(PretrainedConfig):
    model_type = "mine"
"""


@case("kit/model/load.py:open_config", then="not a causal language model")
def a_model_with_code_of_its_own(world):
    shutil.copytree((world.folder / "model").resolve(), world.folder / "own")
    about = {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MineConfig"}}
    world.write("own/config.json", json.dumps(about))
    world.write("own/configuration_mine.py", CODE)
    world.monkeypatch.setenv("HF_MODULES_CACHE", str(world.folder / "modules"))
    return "finetune --model_name_or_path own"


@case("kit/model/freeze.py:check_freeze")
def a_pattern_with_a_slip(world):
    return "finetune --method full --freeze model.embd_tokens.weight"


@case("kit/model/freeze.py:check_freeze")
def a_pattern_that_names_a_part(world):
    return "finetune --method full --train_only layers.1"


@case("kit/model/parts.py:check_parts#1")
def routers_of_a_model_without(world):
    return "finetune --router_aux_loss_coef 0.1"


@case("kit/model/token_rows.py:_check_whole_modules#1")
def a_whole_module_with_a_slip(world):
    return "finetune --lora_modules_to_save lm_haed"


@case("kit/model/token_rows.py:_check_whole_modules#3")
def a_tied_head_without_its_embedding(world):
    return f"finetune {TINY} --lora_modules_to_save lm_head"


@case("kit/model/tokenizer.py:_add")
def a_new_token_that_exists(world):
    return "finetune --new_tokens '<|im_end|>'"


@case("kit/model/tokenizer.py:_add")
def new_tokens_of_which_one_exists(world):
    return "finetune --new_tokens '<|im_end|>,<a b>'"


@case("kit/model/tokenizer.py:_check_known")
def a_token_with_a_slip(world):
    return "finetune --trainable_tokens '<|im_ende|>'"


@case("kit/model/tokenizer.py:_check_known")
def a_token_that_does_not_exist(world):
    return """finetune --trainable_tokens "<it's>" """


@case("kit/model/tokenizer.py:_check_known")
def tokens_of_which_one_does_not_exist(world):
    return "finetune --trainable_tokens '<|im_end|>,<xyz>'"


@case("kit/model/untrained.py:check_stop_tokens")
def a_model_that_cannot_learn_to_stop(world):
    base = shutil.copytree((world.folder / "model").resolve(), world.folder / "base")
    weights = load_file(base / "model.safetensors")
    weights["lm_head.weight"][:3] = 0
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    return "finetune --model_name_or_path base --max_length 256"


# --- ranks that a launcher started


def as_rank(world, ranks=2):
    """From now on this process is the first of ``ranks``."""
    values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_WORLD_SIZE": 1}
    for name, value in values.items():
        world.monkeypatch.setenv(name, str(value))


def as_printed(world, problem, command):
    """Type the printed command, without a launcher around it."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        world.monkeypatch.delenv(name)
    return as_command(problem.fix.strip("`"))


@case("kit/strategy/launch_problems.py:launch_problems#2", edit=as_printed)
def a_config_of_one_process_under_two(world):
    as_rank(world)
    return "finetune --config single"


@case("kit/strategy/launch_problems.py:launch_problems#4", edit=as_printed)
def another_number_than_the_launcher_started(world):
    as_rank(world)
    return "finetune --config ddp --num_processes 4"


@case("kit/strategy/accelerator.py:check_adapter_units#2", then="launcher")
def a_tied_embedding_that_trains_whole_under_fsdp1(world):
    as_rank(world)
    return f"finetune {TINY} --config fsdp1 --lora_modules_to_save embed_tokens"


def without_line(world, problem, command):
    path = world.folder / "mine.yaml"
    path.write_text(path.read_text().replace(', "fsdp_transformer_layer_cls_to_wrap": "NoSuchLayer"', ""))
    return command


@case("kit/strategy/accelerator.py:check_strategy#1", edit=without_line)
def a_layer_that_the_model_does_not_have(world):
    as_rank(world)
    fsdp = {"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": "NoSuchLayer"}
    config(world, distributed_type="FSDP", mixed_precision="no", fsdp_config=fsdp)
    return "finetune --config mine.yaml"


# --- checkpoints


def checkpoint(world, command, step, **more):
    """Write what a run of this command leaves after ``step`` steps, without weights."""
    folder = left_by(world, command)
    path = folder / f"checkpoints/step-{step:08d}"
    identity = json.loads((folder / "run.json").read_text())["identity"]
    about = {"format": 1, "step": step, "identity": identity, "strategy": {}, "versions": {}, **more}
    world.write(str(path / "manifest.json"), json.dumps({**about, "files": {"state.json": {}}}))
    forge(world.folder / path, {"step": step, "optimizer_scalars": {}})
    return path


@case("kit/run/folder.py:RunFolder.is_finished#1")
def fewer_steps_than_are_done(world):
    checkpoint(world, "finetune --output_dir out --max_steps 8", 6)
    return "finetune --output_dir out --max_steps 4"


@case("kit/run/folder.py:RunFolder.is_finished#2", then="run.json|strategy")
def a_checkpoint_of_weights_only(world):
    checkpoint(world, "finetune --output_dir 'my out' --max_steps 8 --save_only_model", 6, weights_only=True)
    return "finetune --output_dir 'my out' --max_steps 8 --save_only_model"


@case("kit/run/resume.py:_chosen", then="run.json|strategy")
def a_checkpoint_of_another_run(world):
    path = checkpoint(world, "finetune --output_dir out --max_steps 8", 6)
    return f"finetune --output_dir new --max_steps 8 --learning_rate 1e-3 --resume_from_checkpoint {path}"


@case("kit/checkpoint/manifest.py:find_checkpoint", says="no checkpoint of this run is complete", then="state.json")
def only_damaged_checkpoints(world):
    path = checkpoint(world, "finetune --output_dir out --max_steps 8", 6)
    (path / "state.json").write_text("{")
    return "finetune --output_dir out --max_steps 8"


def moved_away(world, problem, command):
    (world.folder / "out/checkpoints/step-00000008").unlink()
    return command


@case("kit/run/folder.py:_problems_with_later", edit=moved_away)
def a_file_where_a_checkpoint_would_be(world):
    checkpoint(world, "finetune --output_dir out --max_steps 8", 6)
    world.write("out/checkpoints/step-00000008", "mine")
    return "finetune --output_dir out --max_steps 8"
