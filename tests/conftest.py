"""Fixtures: a tiny random Llama with its tokenizer, a chat dataset, and the real script run as real processes."""

import gc
import json
import os
import random
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from helpers import ROOT, SCRIPTS, WORDS, Finetune, make_model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=20, help="kills of test_random_kills, dealt over its cases")
    parser.addoption("--interrupts", type=int, default=1, help="times that test_interrupts presses Ctrl-C in each form")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For ``-n auto``: two workers for each core, because many tests wait for other processes or for a time limit.

    One for the fast tier, of which none waits, and where a worker costs more than its share of the tests.
    """
    return (1 if config.option.markexpr == "not slow" else 2) * (os.cpu_count() or 1)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Give a worker few tests at a time: their times differ a hundredfold."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist, config.option.maxschedchunk = "load", 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start what takes longest first, so that no worker is busy alone at the end."""
    folders = ("promises", "recipes", "failures")
    items.sort(key=lambda item: (not item.get_closest_marker("slow"), item.path.parent.name not in folders))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests neither read nor fill the user's cache of tokenised data."""
    os.environ["KIT_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama: 3 layers, hidden 32, 4 heads / 2 KV heads, own byte-level tokenizer with a chatml template."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def chat_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """61 chats of one or two turns, of very different lengths."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    rng = random.Random(0)

    def words(low: int, high: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))

    with path.open("w") as file:
        for i in range(61):
            messages = [{"role": "user", "content": words(1, 30)}, {"role": "assistant", "content": words(1, 60)}]
            if i % 3 == 0:
                messages += [{"role": "user", "content": words(1, 8)}, {"role": "assistant", "content": words(1, 20)}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture
def finetune(model_folder: Path, chat_file: Path, tmp_path: Path) -> Finetune:
    return Finetune(model_folder, chat_file, tmp_path)


@pytest.fixture
def typed_here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Any]]:
    """Types a command in this process and folder: its status and what it printed on each stream."""

    exit_now, this = os._exit, os.getpid()

    def leave(status: int) -> None:
        if os.getpid() != this:  # the process that renders templates
            exit_now(status)
        raise SystemExit(status)

    def typed(command: str) -> tuple[Any, str, str]:
        program, *words = shlex.split(command)
        script = ROOT / (program if program in SCRIPTS else "kit/cli/main.py")
        monkeypatch.setattr(sys, "argv", [str(script), *words])
        with pytest.raises(SystemExit) as left, patch.dict(os.environ):
            runpy.run_path(str(script), run_name="__main__")
        out, err = capfd.readouterr()
        return left.value.code, out.strip("\n"), err.strip("\n")

    monkeypatch.setenv("COLUMNS", "120")  # where argparse breaks lines
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with patch.dict(os.environ):
        yield typed


@pytest.fixture
def recipe(model_folder: Path, chat_file: Path, tmp_path: Path) -> Callable[..., Any]:
    """A recipe on the tiny Llama and the chats, with other settings as keywords."""
    from kit.config.recipe import Recipe

    def recipe(**changes: Any) -> Recipe:
        plain = {"model_name_or_path": str(model_folder), "dataset": str(chat_file), "max_length": 256}
        return Recipe(**plain | {"output_dir": str(tmp_path / "out")} | changes)

    return recipe


@pytest.fixture(scope="session")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The shipped Accelerate configs with precision "no": what parity is measured in."""
    folder = tmp_path_factory.mktemp("configs")
    paths = {}
    for path in (ROOT / "accelerate_configs").glob("*.yaml"):
        text = path.read_text().replace("mixed_precision: bf16", 'mixed_precision: "no"')
        (folder / path.name).write_text(text)
        paths[path.stem] = str(folder / path.name)
    return paths


def pytest_collection_finish() -> None:
    """Hide what the imports left from the garbage collector: it would search all of it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def build(model_folder):
    """A model and its optimiser, as a run has them."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from memory_helpers import make

    from kit.model.build import build_model, open_config
    from kit.model.load_plan import LoadPlan
    from kit.train.optim.optim import build_optimizer

    Accelerator(cpu=True)  # its optimiser asks for one

    def build(method="full", optim="adamw_torch", compute_dtype="float32", **changes):
        recipe = make(model_name_or_path=str(model_folder), method=method, optim=optim, **changes)
        trained_dtype = "bfloat16" if optim == "adamw_bf16" else "float32"
        plan = LoadPlan(compute_dtype=compute_dtype, trained_dtype=trained_dtype, device="cpu")
        model = build_model(recipe, open_config(recipe), plan, packing=recipe.packing, seed=recipe.seed)
        return model, AcceleratedOptimizer(build_optimizer(model, recipe, recipe.peak_learning_rate))

    return build


@pytest.fixture(scope="session")
def audio_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a random model of a family that hears sounds, once: ``audio_model("qwen2_audio")``."""
    from audio_models import make_audio_model

    return cache(lambda family: make_audio_model(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a random model of a family that reads images, once: ``vision_model("qwen2_vl")``."""
    from vision_models import make_vision_model

    return cache(lambda family: make_vision_model(family, tmp_path_factory.mktemp(family)))
