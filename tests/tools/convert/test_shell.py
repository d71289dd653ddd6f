"""A command is read out of a script as a shell would pass it on, and nothing is executed."""

import pytest

from kit.errors import UserError
from kit.tools.convert.shell import read_command

SCRIPT = """\
# 4 GPUs
nproc=4
MODEL=Qwen/Qwen3-8B  # the model
NPROC_PER_NODE=$nproc CUDA_VISIBLE_DEVICES=0,1,2,3 \\
swift sft \\
    --model ${MODEL} \\
    --dataset 'a/b#500' \\
              c.jsonl \\
    --gradient-accumulation-steps $(expr 16 / $nproc) \\
    --use_liger_kernel \\
    --lora_rank=8
rm -rf /
"""


def test_flags_are_read_with_the_values_of_the_scripts_own_variables():
    command = read_command(SCRIPT, "a.sh")
    assert (command.kit, command.program, command.num_processes) == ("ms-swift", "swift sft", 4)
    assert command.flags == {
        "model": "Qwen/Qwen3-8B",
        "dataset": ["a/b#500", "c.jsonl"],
        "gradient_accumulation_steps": 4,
        "use_liger_kernel": True,
        "lora_rank": 8,
    }


@pytest.mark.parametrize(
    ("line", "kit", "num_processes"),
    [
        ("trl dpo --beta 0.1", "TRL", None),
        ("accelerate launch --num_processes 8 trl/scripts/sft.py --x 1", "TRL", 8),
        ("torchrun --nproc_per_node=2 swift/cli/sft.py --x 1", "ms-swift", 2),
        ("NNODES=2 NPROC_PER_NODE=8 megatron sft --x 1", "ms-swift", 16),
        ("CUDA_VISIBLE_DEVICES=0 llamafactory-cli train --stage sft", "LLaMA-Factory", None),
        ("deepspeed --num_gpus 4 src/train.py --stage sft", "LLaMA-Factory", 4),
    ],
)
def test_programs_that_train_are_known_also_behind_a_launcher(line, kit, num_processes):
    command = read_command(line, "a.sh")
    assert (command.kit, command.num_processes) == (kit, num_processes)


@pytest.mark.parametrize(
    ("line", "found", "fix"),
    [
        ("NPROC_PER_NODE=2 swift sft a.yaml", "a.yaml", "kit convert a.yaml --num_processes 2"),
        ("trl sft --config b/c.yml", "b/c.yml", "kit convert b/c.yml"),
        ("llamafactory-cli train a.json lr=1", "a.json, beside those in other flags", "kit convert a.json"),
        ('megatron rlhf --config "$DIR/a.yaml"', "scripts/a.yaml", "kit convert scripts/a.yaml"),
    ],
)
def test_a_command_whose_settings_stand_in_a_file_names_it(line, found, fix):
    with pytest.raises(UserError) as raised:
        read_command(line, "scripts/run.sh")
    (problem,) = raised.value.problems
    assert (problem.found, problem.fix) == (f"a command whose settings stand in {found}", fix)


@pytest.mark.parametrize("text", ["", "swift infer --model m\n", "echo 'trl'\n", "swift sft 'open\n"])
def test_a_script_that_trains_nothing_is_a_message(text):
    with pytest.raises(UserError, match="no command that trains"):
        read_command(text, "a.sh")


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("swift sft --dataset a/b#500 --x 1", "a/b#500"),
        ("swift sft --dataset 'Say: x' --x 1", "Say: x"),
        ("swift sft --dataset 'a #b' --x 1  # the user's own", "a #b"),
        ('swift sft --dataset "a \\" #b" --x 1 # "', 'a " #b'),
    ],
)
def test_a_comment_begins_where_a_shell_begins_it(line, value):
    assert read_command(line, "a.sh").flags == {"dataset": value, "x": 1}


def test_what_a_shell_would_compute_by_running_something_stays_as_it_is():
    flags = read_command("swift sft --model $(cat secret) --seed $(( 2 ** 9 )) --x $UNSET", "a.sh").flags
    assert "secret" in str(flags) and flags["seed"] != 512 and flags["x"] == "$UNSET"
