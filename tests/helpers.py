"""What tests share: a tiny random Llama, the real scripts run as real processes, forged checkpoints."""

import json
import multiprocessing
import os
import pkgutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kit
from kit.data.chat.shipped import SHIPPED

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("recipes/finetune.py", "recipes/score.py", "recipes/sample.py", "recipes/export.py")
WORDS = "red green blue small large round cat dog bird fish house river stone paper cloud seven eight nine".split()
# As the scripts set it; here the server imports torch before they run.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Children fork from a server that has done the slow imports: a run then starts in under a second.
_forkserver = multiprocessing.get_context("forkserver")
_SLOW_IMPORTS = "torch transformers accelerate peft.tuners.lora datasets bitsandbytes"
_forkserver.set_forkserver_preload(
    [*_SLOW_IMPORTS.split(), *(module.name for module in pkgutil.walk_packages(kit.__path__, "kit."))]
)


def matrix(cases: Iterable[Any], always: int = 1, rest: Iterable[Any] = ()) -> list[Any]:
    """Cases for ``parametrize``.

    Args:
        cases: the most telling ones first.
        always: how many of ``cases`` the default tier runs, as CI does. The next one is in the long tier.
        rest: what runs before a release, as the other ``cases`` do; those that are among these are left out.
    """
    cases = list(cases)
    others = [*cases[always + 1 :], *(case for case in rest if case not in cases)]
    params = [(case, ()) for case in cases[:always]]
    params += [(case, (pytest.mark.slow, pytest.mark.long)) for case in cases[always : always + 1]]
    params += [(case, (pytest.mark.slow, pytest.mark.release)) for case in others]
    return [pytest.param(*case if isinstance(case, tuple) else (case,), marks=marks) for case, marks in params]


def make_model(folder: Path, **changes: Any) -> Path:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [" ".join(WORDS)] * 4, trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = SHIPPED["chatml"].source
    tokenizer.save_pretrained(folder)
    shape = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**(shape | changes))).save_pretrained(folder)
    return folder


@dataclass
class Run:
    """What a run of the script left behind."""

    status: int  # of rank 0
    output: str
    folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def losses(self) -> list[str]:
        """As float hex: equal only when every bit is."""
        return [float(row["loss"]).hex() for row in self.rows if "loss" in row]

    @property
    def grad_norms(self) -> list[float]:
        return [row["grad_norm"] for row in self.rows if "loss" in row]

    @property
    def info(self) -> dict[str, Any]:
        return json.loads((self.folder / "run.json").read_text())


# Called over and over with the processes of the ranks while they run, until it returns true.
Meanwhile = Callable[[list[Any]], bool]
# Called in each rank, with its number, before the script.
Prepare = Callable[[int], None]


class Finetune:
    """Runs ``recipes/finetune.py``, each rank a real process, with flags as keywords."""

    def __init__(self, model_folder: Path, chat_file: Path, folder: Path) -> None:
        self.folder = folder
        self.defaults: dict[str, Any] = {
            "model_name_or_path": model_folder,
            "dataset": chat_file,
            "max_length": 256,
            "global_batch_size": 8,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "max_steps": 6,
        }

    def __call__(
        self,
        output: str,
        processes: int = 1,
        meanwhile: Meanwhile | None = None,
        prepare: Prepare | None = None,
        **flags: Any,
    ) -> Run:
        folder = self.folder / output
        flags = {"output_dir": folder, **self.defaults, **flags}
        status, text = self._run("finetune", output, processes, flags, meanwhile=meanwhile, prepare=prepare)
        metrics = folder / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        return Run(status, text, folder, rows)

    def score(self, output: str, processes: int = 1, prepare: Prepare | None = None, **flags: Any) -> Run:
        """The same for ``recipes/score.py``."""
        return Run(*self._run("score", output, processes, flags, prepare=prepare), self.folder)

    def _run(self, script: str, output: str, processes: int, flags: dict[str, Any], **more: Any) -> tuple[int, str]:
        words = [f"--{name}={value}" for name, value in flags.items()]
        log = self.folder / f"{output}.log"
        run_ranks(script, words, processes, log, **more)
        return int(log.with_suffix(".status").read_text()), log.read_text()

    def ok(self, output: str, processes: int = 1, **flags: Any) -> Run:
        run = self(output, processes, **flags)
        assert run.status == 0, run.output
        return run


def run_ranks(
    script: str,
    words: list[str],
    processes: int,
    log: Path,
    deadline_seconds: float = 480,
    meanwhile: Meanwhile | None = None,
    prepare: Prepare | None = None,
) -> None:
    """Run a recipe script on ``processes`` ranks; output of all goes to ``log``, rank 0's status beside it."""
    port = free_port()
    log.write_text("")
    children = [
        _forkserver.Process(target=_rank, args=(script, words, rank, processes, port, str(log), prepare), daemon=True)
        for rank in range(processes)
    ]
    for child in children:
        child.start()
    try:
        end = time.monotonic() + deadline_seconds
        alive = children
        while meanwhile and alive and time.monotonic() < end and not meanwhile(children):
            time.sleep(0.02)
            alive = [child for child in children if child.is_alive()]
        for child in children:
            child.join(max(0, end - time.monotonic()))
            assert child.exitcode is not None, f"no end within {deadline_seconds} s:\n{log.read_text()}"
            if child.exitcode:
                break  # the others may wait for it in a collective
    finally:
        for child in children:
            child.kill()
            child.join()
    log.with_suffix(".status").write_text(str(children[0].exitcode))


def _rank(
    script: str, words: list[str], rank: int, processes: int, port: int, log: str, prepare: Prepare | None
) -> None:
    """In the child: become one rank of the script, as torchrun would start it."""
    import runpy

    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if processes > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
    # One thread a rank: models so small gain nothing by a second, and several tests run at once.
    os.sched_getaffinity = lambda _: set(range(processes))
    path = str(ROOT / "recipes" / f"{script}.py")
    sys.argv = [path, *words]
    if prepare:
        prepare(rank)
    runpy.run_path(path, run_name="__main__")


def typed(
    *words: str,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    text: str = "",
    timeout: float = 300,
    own_kit: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Run ``python WORDS`` as ``subprocess.run`` does: ``-m MODULE`` or a script. It begins after the slow imports.

    Args:
        env: variables to set. A library that reads one when it is imported does not see it.
        text: standard input.
        own_kit: the script belongs to another clone, and imports the kit anew.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("in", "out", "err")]
        for path in paths:
            path.write_text(text if path.name == "in" else "")
        child = _forkserver.Process(target=_typed, args=(words, dict(env or {}), cwd, paths, own_kit), daemon=True)
        child.start()
        child.join(timeout)
        child.kill()
        child.join()
        assert child.exitcode is not None
        return subprocess.CompletedProcess(words, child.exitcode, paths[1].read_text(), paths[2].read_text())


def _typed(words: tuple[str, ...], env: dict[str, str], cwd: Path, paths: list[Path], own_kit: bool) -> None:
    """In the child: become the command."""
    import runpy

    for number, (path, mode) in enumerate(zip(paths, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True)):
        os.dup2(os.open(path, mode | os.O_APPEND), number)
    sys.stdin = open(0)  # noqa: SIM115
    os.chdir(cwd)
    os.sched_getaffinity = lambda _: {0}
    if own_kit:
        for name in [name for name in sys.modules if name.partition(".")[0] == "kit"]:
            del sys.modules[name]

    def become(_: str, words: list[str], env: dict[str, str]) -> None:
        os.environ |= env
        sys.argv = words[2:] if words[1] == "-m" else words[1:]
        if words[1] == "-m":
            sys.modules.pop(words[2], None)
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[1], run_name="__main__")
        sys.exit()

    os.execve = become  # as `kit train` becomes the script
    become(sys.executable, [sys.executable, *words], env)


# A stand-in of llama.cpp's: beside it, ``mode`` is why it fails, and ``log.jsonl`` gets what it was asked.
FAKE_CONVERTER = """
import json, sys, pathlib
folder, words = pathlib.Path(sys.argv[1]), sys.argv[2:]
log = pathlib.Path(__file__).with_name("log.jsonl")
log.open("a").write(json.dumps(sys.argv[1:]) + "\\n")
mode = pathlib.Path(__file__).with_name("mode").read_text()
if mode:
    sys.exit(mode)
assert (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()
pathlib.Path(words[words.index("--outfile") + 1]).write_bytes(b"GGUF")
"""


# Copies the model that it is to quantise, and keeps what it was asked for; or fails as ``mode`` says.
_FAKE_LLMCOMPRESSOR = """
import json, pathlib, shutil, sys
home = pathlib.Path(__file__).parents[1]
shutil.copy(sys.argv[-1], home / "asked.json")
asked = json.loads((home / "asked.json").read_text())
print("(1/2): Calibrating", flush=True)
if mode := (home / "mode").read_text():
    sys.exit(mode)
for name in ("config.json", "generation_config.json", "model.safetensors"):
    shutil.copy(pathlib.Path(asked["model"], name), asked["folder"])
"""


def fake_llmcompressor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder of an environment whose Python is a stand-in of llmcompressor, and let the kit find it."""
    home = folder / "llmcompressor"
    (home / "lib/python3/site-packages/llmcompressor").mkdir(parents=True)
    (home / "bin").mkdir()
    (home / "mode").write_text("")
    (home / "bin/python").write_text(f"#!{sys.executable}\n{_FAKE_LLMCOMPRESSOR}")
    (home / "bin/python").chmod(0o755)
    monkeypatch.setenv("LLMCOMPRESSOR", str(home))
    monkeypatch.setattr("kit.export.compressed.find_spec", lambda name: object())
    return home


def export(source: Path, output: Path, *flags: str) -> None:
    """``recipes/export.py`` in this process: its mistakes are raised."""
    import runpy
    from unittest.mock import patch

    path = str(ROOT / "recipes/export.py")
    with patch.object(sys, "argv", [path, str(source), f"--output_dir={output}", *flags]):
        runpy.run_path(path)["main"]()


def forge(checkpoint: Path, state: Any = None, **changes: Any) -> None:
    """Give a checkpoint another state, or other entries in its manifest (``...``: none), with every hash right."""
    from kit.checkpoint.manifest import describe_file, digest_of

    manifest = json.loads((checkpoint / "manifest.json").read_text())
    if state is not None:
        (checkpoint / "state.json").write_text(json.dumps(state))
    manifest["files"] = {name: describe_file(checkpoint / name) for name in manifest["files"]}
    manifest = {key: value for key, value in (manifest | changes).items() if key != "xxh3_128" and value is not ...}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"xxh3_128": digest_of(manifest)}))


def actual_strategy(**changes: Any) -> Any:
    """What a run on two processes of FSDP2 says of itself."""
    from kit.strategy.topology import ActualStrategy, ShardedLayers

    values: dict[str, Any] = {
        "type": "fsdp2",
        "config": "fsdp",
        "num_processes": 2,
        "num_replicas": 1,
        "mixed_precision": "bf16",
        "device": "cpu",
        "cpu_dry_run": False,
        "sharded_layers": ShardedLayers(["LlamaDecoderLayer"], 4),
        "offload": False,
        "num_threads": 1,
        "trainable_parameters": 1234567,
    }
    return ActualStrategy(**(values | changes))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def with_gpus(monkeypatch, *gpus):
    """Let torch report these GPUs, each as its name and its compute capability, which may have no minor number."""
    import torch

    gpus = [
        SimpleNamespace(name=name, major=major, minor=sum(minor), total_memory=2**34) for name, major, *minor in gpus
    ]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpus[0].name)


def signal_in_step(number: int, sent: int, receiver: int | None, rank: int) -> None:
    """In a rank, before the script: a signal arrives in that step at ``receiver``; None: at each rank."""
    import kit.train.step

    real, steps = kit.train.step.train_step, []

    def train_step(*args, **options):
        steps.append(1)
        if len(steps) == number and receiver in (None, rank):
            os.kill(os.getpid(), sent)
        return real(*args, **options)

    kit.train.step.train_step = train_step


def from_scale(scale: float, then: Prepare | None, rank: int) -> None:
    """In a rank, before the script: a new run in fp16 begins with this loss scale."""
    from kit.run.folder import RunFolder

    resume = RunFolder.resume

    def resumed(self, accelerator):
        state = resume(self, accelerator)
        if state.step == 0:
            state.loss_scale = scale
        return state

    RunFolder.resume = resumed
    if then:
        then(rank)


def small_tiles(then, rank: int) -> None:
    """In a rank, before the script: tiles of 16 tokens, so that rows of 64 have several."""
    import kit.model.layers.tiled_mlp

    kit.model.layers.tiled_mlp.TILE = 16
    if then:
        then(rank)
