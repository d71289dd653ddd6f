"""Fixes of the run's folder, of checkpoints, of launching and of machines."""

import fcntl
import json
import shutil
from unittest.mock import patch

from fixes.harness import case
from helpers import actual_strategy

from kit import preflight

_ADDRESS = "only the user knows the addresses of the machines"
_MACHINES = "several machines that start together: tests/promises/test_two_hosts.py"
UNTYPED = {
    "kit/run/mirror.py:Mirror.finish": "a store that failed: tests/run/test_mirror.py repeats it",
    "kit/run/mirror.py:Mirror.restore": "each checkpoint of the copy is damaged: tests/run/test_mirror.py damages one",
    "kit/strategy/network.py:check_own_name": _ADDRESS,
    "kit/strategy/network.py:check_main_address#1": _ADDRESS,
    "kit/strategy/network.py:check_main_address#2": _ADDRESS,
    "kit/strategy/machines.py:Machines.reach_store": _MACHINES,
    "kit/strategy/launch_problems.py:_absent_machines": _MACHINES,
    "kit/strategy/launch_problems.py:_machine_problems#1": "a config for several machines, of the user's own",
    "kit/strategy/rendezvous.py:join_group": "a port of the launcher, which another program takes",
    "kit/run/shared.py:_check_same_folder": "a disk that machines share",
    "kit/strategy/launch.py:_package_problems": "installs a package; on a Mac tests/strategy/test_launch.py types it",
    "kit/run/trackers.py:start_trackers": "a tracker without a network: tests/run/test_trackers.py holds the flag",
    "kit/cli/chat.py:_own_flags#1": "of kit chat: tests/tools/test_chat.py types it",
    "kit/cli/chat.py:_own_flags#2": "to leave out a flag of kit chat",
    "kit/cli/model_words.py:split_words": "of kit chat: the folder of a run",
    "kit/tools/chat.py:Speaker.prompt_ids": "typed into kit chat",
    "kit/tools/chat.py:_speakers.template_of": "of kit chat: tests/tools/test_chat.py types it",
    "kit/tools/opening.py:open_models": "to leave out a flag of kit chat",
    "kit/tools/opening.py:plan_one_process": "of kit chat: tests/tools/test_chat.py types it",
    **{
        f"kit/tools/push.py:{site}": "of kit push, about a hub: tests/tools/test_push.py types those of one command"
        for site in (
            "_base_of _check_complete#1 _check_complete#2 _check_credentials _licence_on_hub _model_folder#1 "
            "_model_folder#2 _read_json _record_of_run"
        ).split()
    },
    **{
        f"kit/upload.py:{site}": "about a hub: tests/test_upload.py, tests/tools/test_push.py"
        for site in (
            "answers#1 answers#2 answers#3 answers#4 find_repository#1 find_repository#2 find_repository#3 "
            "find_repository#4 find_repository#5 find_repository#6 find_repository#7 find_repository#8"
        ).split()
    },
    "kit/upload.py:check_upload#1": "to leave out the setting",
    "kit/cli/rates.py:_length": "of kit rates: tests/cli/test_rates.py types it",
    "kit/cli/rates.py:_taken": "of kit rates: tests/cli/test_rates.py types it",
    "kit/strategy/launch_problems.py:launch_problems#1": "typed under accelerate launch: tests/strategy/test_launch.py",
    "kit/model/compile.py:check_compile#1": "a family that has no folder here: tests/model/test_compile.py",
    "kit/model/compile.py:check_compile#2": "no such family is known: tests/model/test_compile.py",
    **{
        f"kit/export/{site}": "about llama.cpp or Ollama: tests/export types them"
        for site in (
            "gguf.py:find_tools#1 gguf.py:find_tools#2 gguf.py:find_tools#3 gguf.py:check_tokenizer#1 "
            "gguf.py:check_tokenizer#2 gguf.py:_try_pretokenisers ollama.py:find_frame ollama.py:modelfile "
            "sentencepiece_file.py:write_sentencepiece"
        ).split()
    },
    **{
        f"recipes/export.py:{site}": "flags of kit export: tests/export/test_source.py"
        for site in "_problems#1 _problems#2 _problems#3 _problems#4 _problems#5".split()
        + "_problems_of#1 _problems_of#2 _problems_of#3".split()
    },
    "kit/export/source.py:find_source": "weights of a run: tests/promises/test_export_roundtrip.py",
    "kit/model/compile.py:CompiledLayers._call": "a compiler that fails: tests/model/test_compile.py",
    "kit/train/compilation.py:compile_first": "a compiler that fails: tests/model/test_compile.py",
    "kit/preflight.py:check_bitsandbytes": "a package that is installed but broken",
    "kit/failures/exits.py:_explain_disk": "a full disk",
    "kit/cache.py:cannot_write": "a full disk, or one that cannot be written to",
    "kit/cache.py:open_entry": "a limit of the system's open files",
    "kit/cache.py:allow_open_files": "a limit of the system's open files",
    "kit/checkpoint/save.py:Saver.wait": "a disk that failed while the run saved",
    "kit/run/folder.py:RunFolder.open": "two runs that start at the same moment: tests/run/test_folder.py",
    "kit/run/output_dir.py:check_writable#2": "a folder of another user: root, who runs tests, may write to all",
    "kit/lock.py:check_free": "a lock file of another user: root, who runs tests, may read all",
    "kit/strategy/precision.py:check_precision": "a GPU without bf16",
    "kit/model/attention.py:use_flash_attention_3": "a package that is installed but broken",
    "kit/memory/fit.py:memory_problems": "a GPU that is too small: tests/memory/test_fit.py holds that the advice fits",
    "kit/memory/advice.py:explain": "a run that ran out of memory: tests/memory/test_advice.py",
    "kit/hub.py:refusal#1": "a page of the hub to read",
    "kit/hub.py:refusal#2": "a licence to accept on the hub",
    "kit/hub.py:refusal#3": "an account of the hub",
    "kit/hub.py:refusal#4": "an account of the hub",
    "kit/hub.py:refusal#5": "an account of the hub",
    "kit/hub.py:refusal#6": "a hub that does not answer",
    "kit/hub.py:refusal#7": "a network",
    "kit/hub.py:not_cached": "a network",
}


def left_by(world, command, more=None, finished_steps=0, **changes):
    """Write the ``run.json`` that a run of this command leaves, with ``more`` keys and other settings."""
    checked = []
    check = preflight.check

    def keeping(*args, **kwargs):
        checked.append(check(*args, **kwargs))
        return checked[-1]

    with patch.object(preflight, "check", keeping):
        assert world.run(command) == []
    folder = checked[0].folder
    recipe = checked[0].recipe.model_dump(mode="json") | changes
    record = {"recipe": recipe, "identity": folder.identity, "finished_steps": finished_steps, **(more or {})}
    world.write(str(folder.path / "run.json"), json.dumps(record))
    return folder.path


# --- kit/run/output_dir.py


@case("kit/run/output_dir.py:check_writable#1")
def a_file_where_the_folder_would_be(world):
    world.write("out", "mine")
    return "finetune --output_dir out/run"


@case("kit/run/output_dir.py:check_writable#3", says="proc")
def a_folder_of_the_kernel(world):
    return "finetune --output_dir /proc/run"


@case("kit/run/output_dir.py:run_in#1")
def a_folder_with_other_files(world):
    world.write("out/thesis.txt", "mine")
    return "finetune --output_dir out"


@case("kit/run/output_dir.py:run_in#2")
def a_record_of_something_else(world):
    world.write("out/run.json", "{}")
    return "finetune --output_dir out"


@case("kit/run/output_dir.py:check_owner#1", says="dataset: chats.jsonl -> a.jsonl,more.jsonl")
def a_folder_with_another_run(world):
    left_by(world, "finetune --output_dir 'my out'")
    for name in ("a.jsonl", "more.jsonl"):
        world.write(name, *(world.folder / "chats.jsonl").read_text().splitlines())
    return "finetune --output_dir 'my out' --dataset a.jsonl,more.jsonl"


@case("kit/run/output_dir.py:check_owner#1")
def a_folder_with_a_run_of_another_rate_and_a_second_one(world):
    left_by(world, "finetune --output_dir out")
    world.write("out-2/thesis.txt", "mine")
    return "finetune --output_dir out --learning_rate 1e-3"


@case("kit/run/output_dir.py:check_owner#2")
def a_run_that_is_not_to_be_resumed(world):
    left_by(world, "finetune --output_dir out")
    return "finetune --output_dir out --resume_from_checkpoint none"


# --- kit/run/mirror.py


@case("kit/run/mirror.py:Mirror._check_apart")
def a_copy_inside_of_the_folder(world):
    return "finetune --output_dir 'my out' --mirror_to 'my out/copy'"


@case("kit/run/mirror.py:Mirror._check_apart")
def a_copy_around_the_folder(world):
    return "finetune --output_dir 'all/my out' --mirror_to all"


@case("kit/run/mirror.py:Mirror._check_owner#1")
def a_copy_among_other_files(world):
    world.write("my copy/thesis.txt", "mine")
    return "finetune --mirror_to 'my copy'"


@case("kit/run/mirror.py:Mirror._check_owner#2")
def a_copy_whose_record_is_damaged(world):
    world.write("copy/run.json", "{}")
    return "finetune --mirror_to copy"


@case("kit/run/mirror.py:Mirror._check_owner#3")
def a_copy_of_another_run(world):
    left_by(world, "finetune --output_dir out")
    shutil.move(world.folder / "out", world.folder / "copy")
    return "finetune --output_dir out --mirror_to copy --learning_rate 1e-3"


@case("kit/run/mirror.py:Mirror._check_owner#4")
def a_copy_of_a_run_that_is_not_to_be_resumed(world):
    left_by(world, "finetune --output_dir out")
    shutil.move(world.folder / "out", world.folder / "copy")
    return "finetune --output_dir out --mirror_to copy --resume_from_checkpoint none"


@case("kit/run/output_dir.py:_problems_with_inputs")
def data_in_the_folder_to_be_overwritten(world):
    left_by(world, "finetune --output_dir out")
    world.write("out/mine.jsonl", *(world.folder / "chats.jsonl").read_text().splitlines())
    return "finetune --output_dir out --overwrite_output_dir --dataset out/mine.jsonl"


def moved_away(world, problem, command):
    (world.folder / "out/metrics.jsonl").rename(world.folder / "elsewhere")
    return command


@case("kit/run/output_dir.py:_problems_with_kinds#1", edit=moved_away)
def a_link_among_the_files_of_a_run(world):
    left_by(world, "finetune --output_dir out")
    (world.folder / "out/metrics.jsonl").symlink_to(world.folder / "thesis.txt")
    return "finetune --output_dir out"


@case("kit/run/output_dir.py:_problems_with_kinds#2", edit=moved_away)
def a_folder_among_the_files_of_a_run(world):
    left_by(world, "finetune --output_dir out")
    (world.folder / "out/metrics.jsonl").mkdir()
    return "finetune --output_dir out"


# --- kit/upload.py


def without_upload(world, problem, command):
    return command.partition(" --push_to_hub")[0]


@case("kit/upload.py:check_upload#2", edit=without_upload)
@case("kit/upload.py:check_upload#3", edit=without_upload)
def an_upload_of_what_a_folder_began_offline(world):
    return "finetune --output_dir out --push_to_hub me/mine"


# --- kit/run/folder.py, kit/lock.py


@case("kit/run/folder.py:RunFolder.is_finished#3")
def a_finished_run_without_a_checkpoint(world):
    left_by(world, "finetune --output_dir out --max_steps 4", finished_steps=4)
    return "finetune --output_dir out --max_steps 8"


@case("kit/lock.py:_in_use")
def a_folder_in_use(world):
    left_by(world, "finetune --output_dir out")
    file = (world.folder / "out/.lock").open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    world.kept.append(file)  # a closed file is not locked
    return "finetune --output_dir out"


# --- kit/run/record.py, recipes/score.py


def without_the_setting(world, problem, command):
    path = world.folder / "out/run.json"
    record = json.loads(path.read_text())
    assert "delete 'mixout' under 'recipe' in" in problem.fix
    del record["recipe"]["mixout"]
    path.write_text(json.dumps(record))
    return command


@case("kit/run/record.py:_of_another_version", edit=without_the_setting)
def a_run_of_a_later_version(world):
    strategy = actual_strategy().record()
    more = {"strategy": strategy, "versions": {"kit": "9.9"}, "data": {"sources": []}}
    left_by(world, "finetune --output_dir out", more, mixout=0.1)
    shutil.copytree(world.folder / "model", world.folder / "out/final")
    return "score --model_name_or_path out/final --eval_dataset chats.jsonl"


@case("recipes/score.py:main")
def the_data_to_score_on_under_another_flag(world):
    return "score --model_name_or_path model --dataset chats.jsonl"


@case("kit/run/opening.py:reference_of")
def a_whole_model_to_score_against_a_reference(world):
    rows = [f'{{"prompt": "What is {i}?", "chosen": "{i}", "rejected": "No."}}' for i in range(20)]
    world.write("pairs.jsonl", *rows)
    return "score --model_name_or_path model --eval_dataset pairs.jsonl --objective dpo --max_length 256"


# --- kit/strategy


RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "1"}


def config(world, **keys):
    """An Accelerate config of one's own, ``mine.yaml``."""
    world.write("mine.yaml", *(f"{key}: {json.dumps(value)}" for key, value in keys.items()))


@case("kit/strategy/launch.py:_method_problems#1")
def an_optimiser_of_8_bits_under_fsdp(world):
    return "finetune --config fsdp --optim adamw_8bit"


@case("kit/strategy/launch.py:_method_problems#1")
def muon_under_fsdp1(world):
    return "finetune --config fsdp1 --method full --optim muon"


@case("kit/strategy/launch.py:_precision_problems")
def weights_in_bf16_in_float32(world):
    return "finetune --method full --optim adamw_bf16"


@case("kit/strategy/launch.py:_method_problems#2")
def freeze_under_fsdp1(world):
    return "finetune --config fsdp1 --method full --freeze model.embed*"


@case("kit/strategy/launch.py:_method_problems#3")
def dora_under_fsdp1(world):
    return "finetune --config fsdp1 --use_dora"


@case("kit/strategy/launch.py:_method_problems#4")
def new_tokens_under_fsdp1(world):
    return "finetune --config fsdp1 --new_tokens '<a>'"


@case("kit/strategy/launch.py:_batch_problems")
def a_batch_that_processes_cannot_share(world):
    return "finetune --config ddp --num_processes 4 --global_batch_size 30 --per_device_train_batch_size 2"


@case("kit/strategy/launch.py:_batch_problems")
def a_batch_smaller_than_the_processes(world):
    return "finetune --config ddp --num_processes 4 --global_batch_size 3 --per_device_train_batch_size 1"


@case("kit/strategy/launch_problems.py:launch_problems#3")
def processes_with_a_config_of_one(world):
    return "finetune --config single --num_processes 2"


@case("kit/strategy/parallelism.py:GroupSizes.problems#2")
def processes_that_groups_cannot_share(world):
    return "finetune --config fsdp_hybrid --num_processes 3 --global_batch_size 12 --per_device_train_batch_size 1"


SHARDED = {"distributed_type": "FSDP", "mixed_precision": "no", "fsdp_config": {"fsdp_version": 2}}
SIZES = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}


@case("kit/strategy/parallelism.py:GroupSizes.problems#1")
def groups_of_other_numbers(world):
    config(world, **SHARDED, parallelism_config=SIZES)
    return "finetune --config mine.yaml --num_processes 8"


def corrected(old, new):
    def edit(world, problem, command):
        assert not new or new in problem.fix or "remove" in problem.fix or "leave" in problem.fix, problem
        path = world.folder / "mine.yaml"
        path.write_text("".join(line.replace(old, new) for line in path.open() if new or old not in line))
        return command

    return edit


@case("kit/strategy/accelerate_config.py:_refuse_deepspeed")
def a_file_of_deepspeed(world):
    world.write("zero.json", '{"zero_optimization": {"stage": 3}}')
    return "finetune --config zero.json --global_batch_size 32"


@case("kit/strategy/accelerate_config.py:read_config#1", then="not a setting of this kit")
def a_recipe_of_another_kit_as_a_config(world):
    world.write("axo.yaml", "sequence_len: 256")
    return "finetune --model_name_or_path model --dataset chats.jsonl --max_length 256 --config axo.yaml"


@case("kit/strategy/accelerate_config.py:read_config#3", edit=corrected("mixed_precison", "mixed_precision"))
def a_key_of_a_config_with_a_slip(world):
    config(world, distributed_type="NO", mixed_precison="no")
    return "finetune --config mine.yaml"


@case("kit/strategy/accelerate_config.py:read_config#4", edit=corrected("fsdp_verson", "fsdp_version"))
def a_key_of_fsdp_with_a_slip(world):
    config(world, distributed_type="FSDP", mixed_precision="no", fsdp_config={"fsdp_verson": 2})
    return "finetune --config mine.yaml"


@case("kit/strategy/accelerate_config.py:read_config#2", edit=corrected("deepspeed", ""))
def keys_of_deepspeed_without_it(world):
    config(world, distributed_type="NO", mixed_precision="no", deepspeed_config={"zero_stage": 3})
    return "finetune --config mine.yaml"


@case("kit/strategy/accelerate_config.py:make_config.refuse", says="DEEPSPEED")
def a_config_of_deepspeed(world):
    config(world, distributed_type="DEEPSPEED", mixed_precision="no", deepspeed_config={"zero_stage": 3})
    return "finetune --config mine.yaml"


@case("kit/strategy/compiler.py:compile_problems")
def compiling_under_fsdp1(world):
    return "finetune --config fsdp1 --torch_compile true"


@case("kit/strategy/compiler.py:compile_problems")
def compiling_without_a_compiler(world):
    world.monkeypatch.setenv("CXX", "no-such-compiler")
    return "finetune --torch_compile true"


def with_other_value(key, value):
    """An edit of one line of ``mine.yaml``."""

    def edit(world, problem, command):
        path = world.folder / "mine.yaml"
        path.write_text("".join(f"{key}: {value}\n" if line.startswith(key) else line for line in path.open()))
        return command

    return edit


@case("kit/strategy/accelerate_config.py:read_config#5", edit=with_other_value("gpu_ids", "all"))
def a_config_with_gpus(world):
    config(world, distributed_type="NO", mixed_precision="no", gpu_ids="0,1")
    return "finetune --config mine.yaml"


@case("kit/strategy/launch_problems.py:_machine_problems#2", edit=with_other_value("num_machines", 1))
def machines_without_an_address(world):
    config(world, distributed_type="MULTI_GPU", mixed_precision="no", num_machines=2, num_processes=2)
    return "finetune --config mine.yaml"
