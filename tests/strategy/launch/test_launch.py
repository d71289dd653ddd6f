"""Every way to start a command gives the same topology, or an error with the command that works."""

import os
import re
import shlex
import socket
import sys
from dataclasses import replace

import psutil
import pytest
import torch
from helpers import ROOT, with_gpus

from kit.config.command_line import read_command_line
from kit.strategy.launch import launch, launch_problems
from kit.strategy.strategies import DDP, FSDP1, FSDP2, HYBRID, OFFLOAD, SINGLE
from kit.system.errors import UserError

SCRIPT = str(ROOT / "recipes/finetune.py")
CONFIGS = ROOT / "accelerate_configs"
STRATEGIES = {"ddp": DDP, "fsdp": FSDP2, "fsdp_hybrid": HYBRID, "fsdp_offload": OFFLOAD, "fsdp1": FSDP1}


class Relaunched(Exception):
    """Instead of ``os.execve``."""

    def __init__(self, executable, command, env):
        super().__init__(" ".join(command))
        self.command, self.env = command, env


def ranks(world_size):
    """What torchrun leaves in the environment of the first rank."""
    values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    return {name: str(value) for name, value in values.items()} | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def accelerate_env(*words):
    """What ``accelerate launch`` leaves there, from its own code."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch as theirs

    before = dict(os.environ)
    try:
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args([*words, SCRIPT]))
        parallel = args.multi_gpu or args.use_fsdp
        env = theirs.prepare_multi_gpu_env(args) if parallel else theirs.prepare_simple_launcher_cmd_env(args)[1]
        added = {name: value for name, value in env.items() if before.get(name) != value}
        return added | (ranks(args.num_processes) if parallel else {})
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def environments():
    """By configuration and number of processes, asked for once: accelerate takes seconds to import."""
    made = {}

    def environment(config, num_processes):
        key = config, num_processes
        if key not in made:
            made[key] = accelerate_env(
                "--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", num_processes
            )
        return made[key]

    return lambda config, num_processes: dict(environment(config, str(num_processes)))


@pytest.fixture
def resolve(monkeypatch):
    """``launch.resolve`` of a command on a machine with so many GPUs; relaunches are followed into the first rank."""

    def resolve(*words, env=None, gpus=0, follow=True):
        argv = [SCRIPT, *map(str, words)]
        # A batch that 1, 2, 3, 4 and 8 processes can share.
        for flag in ("--global_batch_size=48", "--per_device_train_batch_size=1"):
            argv += [] if any(word.startswith(flag.partition("=")[0]) for word in argv) else [flag]
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(os, "environ", {"PATH": "/bin", "HOME": "/", **(env or {})})
        monkeypatch.setattr(launch, "_devices", lambda strategy: (gpus, "cuda" if gpus else "cpu"))

        def execve(*arguments):
            raise Relaunched(*arguments)

        monkeypatch.setattr(os, "execve", execve)
        try:
            return launch.resolve(read_command_line(argv[1:]))[1]
        except Relaunched as relaunched:
            if not follow:
                raise
            count = int(relaunched.command[relaunched.command.index("--nproc_per_node") + 1])
            monkeypatch.setattr(os, "environ", relaunched.env | ranks(count) | {"KIT_TORCHRUN": "1"})
            monkeypatch.setattr(sys, "argv", relaunched.command[relaunched.command.index(SCRIPT) :])
            return launch.resolve(read_command_line(sys.argv[1:]))[1]

    return resolve


@pytest.fixture
def config_file(tmp_path):
    def config_file(text):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return path

    return config_file


def command_to_type(error):
    """The words of the command that a refusal prints."""
    return shlex.split(re.search(r"-> .*?`(.+)`", str(error))[1])


# The same topology from every form


def test_all_four_forms_give_the_same_topology(resolve, environments):
    for gpus in [0, 1, 4]:
        for config in STRATEGIES:
            case = gpus, config
            processes = gpus or (4 if config == "fsdp_hybrid" else 2)
            if case == (1, "fsdp_hybrid"):
                continue
            plain = (
                environments("ddp", gpus) if gpus > 1 else environments("single", 1)
            )  # accelerate launch without a config
            forms = {
                "accelerate launch script --config": resolve("--config", config, env=plain, gpus=gpus),
                "accelerate launch --config_file": resolve(env=environments(config, processes), gpus=gpus),
                "torchrun script --config": resolve("--config", config, env=ranks(processes), gpus=gpus),
                "python script --config": resolve("--config", config, gpus=gpus),
            }
            wanted = forms["python script --config"]
            without_gpus = {OFFLOAD: FSDP2}  # which have no memory to offload
            strategy = STRATEGIES[config] if gpus else without_gpus.get(STRATEGIES[config], STRATEGIES[config])
            assert (wanted.strategy, wanted.num_processes) == (strategy, processes), case
            assert wanted.mixed_precision == "bf16" and wanted.reshard_after_forward, case
            assert wanted.device_type == ("cuda" if gpus else "cpu") and wanted.cpu_dry_run == (gpus == 0), case
            assert wanted.load_on_rank0 == (config in ("fsdp", "fsdp_hybrid", "fsdp_offload")), case
            assert wanted.num_replicas == (2 if config == "fsdp_hybrid" else 1), case
            by_launcher = forms["accelerate launch --config_file"]
            if config in ("fsdp_hybrid", "fsdp_offload"):  # a launcher does not pass on the name of its file
                forms["accelerate launch --config_file"] = replace(by_launcher, config_name=config)
            for form, topology in forms.items():
                assert topology == wanted, form


def test_one_torchrun_rank_of_a_single_config_is_a_plain_process(resolve):
    """No process group: what torchrun left would make accelerate form one."""
    assert resolve("--config", "single", env=ranks(1)).strategy == SINGLE
    assert not [name for name in os.environ if "RANK" in name or "WORLD" in name or "MASTER" in name]


def test_a_summary_is_printed_before_slow_imports(resolve, capsys):
    resolve("--config", "fsdp", "--output_dir", "mine", gpus=2)
    said = "fine-tuning tiny (full, FSDP2), output_dir mine\n"
    assert capsys.readouterr().out == said  # once: not again by the ranks
    resolve("--config", "fsdp", "--output_dir", "mine", "--dry_run", "true", env=ranks(2) | {"GROUP_WORLD_SIZE": "1"})
    said = said.replace("fine-tuning", "checking").replace("FSDP2", "FSDP2 on 1 machine")  # by a launcher of others
    assert capsys.readouterr().out == said
    with pytest.raises(UserError):
        resolve("--config", "fsdp", "--max_steps", "many")
    assert capsys.readouterr().out == ""


# How many processes


def test_the_flag_beats_the_config_beats_the_machine(resolve, config_file):
    for flag, in_config, gpus, expected in [(None, None, 0, 2), (None, None, 4, 4), (None, 3, 4, 3), (2, 3, 4, 2)]:
        text = "distributed_type: MULTI_GPU\n" + (f"num_processes: {in_config}\n" if in_config else "")
        words = ["--config", config_file(text)] + (["--num_processes", flag] if flag else [])
        assert resolve(*words, gpus=gpus).num_processes == expected, (flag, in_config, gpus)


# Relaunching


def test_the_relaunch_is_this_command_under_torchrun(resolve):
    words = ["--config", "ddp", "--num_processes=3", "--dataset", "a b.jsonl", "--learning_rate=1e-4"]
    with pytest.raises(Relaunched) as caught:
        resolve(*words, follow=False, env={"CUDA_VISIBLE_DEVICES": "1,2,3", "HF_TOKEN": "secret"})
    command = caught.value.command
    assert command[:4] == [sys.executable, str(ROOT / "kit/strategy/launch/torchrun_main.py"), "--nproc_per_node", "3"]
    assert command[command.index(SCRIPT) + 1 :][: len(words)] == words
    assert caught.value.env["CUDA_VISIBLE_DEVICES"] == "1,2,3" and caught.value.env["HF_TOKEN"] == "secret"


LEFT_OVER = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_MIXED_PRECISION": "fp16",
    "ACCELERATE_USE_CPU": "true",
    "FSDP_VERSION": "1",
    "FSDP_OFFLOAD_PARAMS": "true",
    "FSDP_AUTO_WRAP_POLICY": "NO_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "OtherLayer",
    "PARALLELISM_CONFIG_TP_SIZE": "2",
}


def test_variables_of_an_earlier_launch_do_not_leak_into_a_config(resolve):
    for config in ("single", "ddp", "fsdp", "fsdp_offload", "fsdp1"):
        assert resolve("--config", config, env=LEFT_OVER, gpus=2) == resolve("--config", config, gpus=2), config
        assert resolve("--config", config, env=LEFT_OVER | ranks(1), gpus=2).num_processes == 1, config
        assert not set(os.environ) & set(LEFT_OVER), config
    with pytest.raises(Relaunched) as caught:
        resolve("--config", "fsdp", env=LEFT_OVER, follow=False)
    assert not set(caught.value.env) & set(LEFT_OVER)


# Contradictions


def refusal(resolve, *words, **options):
    with pytest.raises(UserError) as caught:
        resolve(*words, **options, follow=False)
    return caught.value


def test_a_single_config_under_two_ranks_prints_the_command_for_one(resolve):
    error = refusal(resolve, "--config", "single", "--dataset", "a b.jsonl", env=ranks(2), gpus=2)
    words = command_to_type(error)
    assert words[:4] == ["accelerate", "launch", "--num_processes", "1"]
    assert words[4] == os.path.relpath(SCRIPT) and words[5:9] == ["--config", "single", "--dataset", "a b.jsonl"]
    assert resolve(*words[5:], gpus=2).strategy == SINGLE


def test_a_gpu_without_bf16_gets_fp16_and_a_line_says_so_once(resolve, config_file, monkeypatch, capsys):
    with_gpus(monkeypatch, ("Tesla T4", 7), ("Tesla T4", 7))
    for config in ("single", "ddp", "fsdp"):
        assert resolve("--config", config, "--method", "qlora", gpus=2).mixed_precision == "fp16", config
        assert capsys.readouterr().out.count("fp16, in place of bf16, which Tesla T4") == 1, config
    error = refusal(resolve, "--config", "ddp", "--method", "full", "--optim", "adamw_bf16", gpus=2)
    assert "adamw_bf16 with mixed_precision fp16" in str(error)
    assert "fp16 under FSDP1" in str(refusal(resolve, "--config", "fsdp1", gpus=2))
    text = "mixed_precision: {}\n"
    for asked in ("no", "fp16"):  # what was asked for
        assert resolve("--config", config_file(text.format(asked)), gpus=1).mixed_precision == asked
    with_gpus(monkeypatch, ("NVIDIA A10G", 8))
    assert resolve("--config", "single", gpus=1).mixed_precision == "bf16"


def test_more_processes_than_gpus_are_refused(resolve):
    error = refusal(resolve, "--config", "ddp", "--num_processes", 4, gpus=2)
    assert "4 on a machine with 2 GPUs" in str(error) and "at most 2" in str(error)
    assert "4 on a machine with 2 GPUs" in str(refusal(resolve, "--config", "ddp", env=ranks(4), gpus=2))


def test_the_same_command_on_several_machines_starts_the_ranks_of_each(resolve, config_file):
    text = "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 8\n"
    assert "main_process_ip: missing" in str(refusal(resolve, "--config", config_file(text), gpus=4))
    for address, is_host in (("192.0.2.7", 0), (own_address(), 1)):
        path = config_file(f"{text}main_process_ip: {address}\n")
        with pytest.raises(Relaunched) as caught:
            resolve("--config", path, "--ddp_timeout", "20", gpus=4, follow=False)
        command = caught.value.command
        assert command[command.index("--nproc_per_node") + 1] == "4" and command[command.index("--nnodes") + 1] == "2"
        assert command[command.index("--rdzv_endpoint") + 1] == f"{address}:29500"
        assert f"is_host={is_host},join_timeout=20" in command[command.index("--rdzv_conf") + 1]


def test_a_run_on_fewer_machines_than_the_config_names_is_refused(resolve, config_file):
    path = config_file("distributed_type: MULTI_GPU\nnum_machines: 2\nmain_process_ip: 10.0.0.1\n")
    error = refusal(resolve, "--config", path, env=ranks(2) | {"GROUP_WORLD_SIZE": "1"})
    assert "num_machines: 2 in the config, the launcher started 1" in str(error)
    assert resolve("--config", path, env=ranks(4) | {"GROUP_WORLD_SIZE": "2"}).num_processes == 4


def test_a_public_address_is_a_warning(resolve, config_file, monkeypatch, capsys):
    monkeypatch.setattr("kit.strategy.processes.network.address_of", lambda name: "9.9.9.9")
    path = config_file("distributed_type: MULTI_GPU\nnum_machines: 2\nmain_process_ip: gpu-a\n")
    with pytest.raises(Relaunched):
        resolve("--config", path, gpus=2, follow=False)
    assert "warning: main_process_ip: gpu-a resolves to 9.9.9.9, a public address" in capsys.readouterr().out


def own_address():
    """An address of this machine in a network."""
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return entry.address
    pytest.skip("this machine has no network")


def test_unsupported_settings_of_a_launcher_are_refused_as_in_a_config(resolve):
    assert "DEEPSPEED" in str(refusal(resolve, env={"ACCELERATE_USE_DEEPSPEED": "true"} | ranks(2)))
    env = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}
    assert "NO_WRAP" in str(refusal(resolve, env=env | ranks(2)))


def test_flags_recipe_and_config_are_reported_at_once(resolve, config_file):
    path = config_file("distributed_type: FSDP\nmixed_precision: fp8\nfsdp_config:\n  fsdp_version: 3\n")
    error = refusal(resolve, "--config", path, "--lerning_rate", 1, "--method", "lorra")
    text = str(error)
    assert all(word in text for word in ("lerning_rate", "lorra", "fp8", "fsdp_version")) and len(error.problems) == 4


# The real thing


def test_processes_that_accelerate_was_asked_for_and_did_not_start_are_reported(resolve, environments, monkeypatch):
    """Without GPUs, `accelerate launch --num_processes 4` starts one."""
    monkeypatch.setattr(launch_problems, "num_processes_of_accelerate", lambda: 4)
    env = environments("single", 1)
    for words in ((), ("--config", "fsdp")):
        with pytest.raises(UserError, match="accelerate launch got 4, and started one process") as caught:
            resolve(*words, env=env)
        wanted = {"--config", words[1] if words else "ddp", "--num_processes", "4"}
        assert wanted <= set(command_to_type(caught.value))
    assert resolve("--config", "ddp", "--num_processes", 4, env=env).num_processes == 4


def test_a_mac_gives_its_gpu_to_a_single_process_only(monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert launch._devices(SINGLE) == (1, "mps") and capsys.readouterr().out == ""
    assert launch._devices(DDP) == (0, "cpu")
    assert "--config single takes it" in capsys.readouterr().out
