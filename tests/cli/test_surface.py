"""Whatever is wrong with a command line: status 2, one block that says what, and nothing written.

``surface.txt`` holds wrong commands and the answer to each, as in a terminal. They run in a folder that has:

    model/         a model of 1024 positions            chats.jsonl    61 chats
    taken/         somebody's file                      broken.jsonl   a row that is no chat, and one that is no JSON
    *.yaml         recipes, and the config of a strategy that is not supported

Where an answer lists all names of a kind, the file has a placeholder of ``LISTS``, such as ``{recipes}``: a new recipe
needs no edit there.
"""

import re
import shutil
from pathlib import Path

import bitsandbytes  # noqa: F401 - imported here, no command in this process takes it for not installed
import pytest
from helpers import ROOT, SCRIPTS

from kit import __version__
from kit.cli.main import COMMANDS, meanings
from kit.cli.main import SCRIPTS as STARTING
from kit.config.validation import FLAGS

FILES = {
    "broken.jsonl": '{"messages": 3}\n{"messages": [\n',
    "empty.jsonl": "",
    "typo.yaml": "# mine\nmodel_name_or_path: model\ndataset: chats.jsonl\nlearning_rat: 1e-4\nmax_steps: many\n",
    "twice.yaml": "model_name_or_path: model\ndataset: chats.jsonl\nseed: 1\nseed: 2\n",
    "syntax.yaml": "model_name_or_path: model\ndataset: [chats.jsonl\nseed: 1\n",
    "list.yaml": "- model_name_or_path\n- dataset\n",
    "conflicts.yaml": "model_name_or_path: model\ndataset: chats.jsonl\nglobal_batch_size: 10\n"
    "per_device_train_batch_size: 4\neval_dataset: chats.jsonl\neval_split_size: 5\n",
    "deepspeed.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: bf16\n",
    "parallel.yaml": "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\nparallelism_config:\n"
    "  parallelism_config_dp_replicate: 2\n  parallelism_config_tp_size: 2\n  parallelism_config_cp_size: 2\n",
    "hybrid_ddp.yaml": "distributed_type: MULTI_GPU\nparallelism_config:\n  parallelism_config_dp_replicate_size: 2\n",
    "taken/thesis.txt": "mine\n",
}


def names_in(folder, suffix):
    return ", ".join(sorted(path.stem for path in (ROOT / folder).glob(f"*{suffix}")))


LISTS = {
    "{recipes}": names_in("recipes", ".yaml"),
    "{configs}": names_in("accelerate_configs", ".yaml"),
    "{templates}": names_in("kit/data/chat/templates", ".jinja"),
    "{commands}": ", ".join([*STARTING, *COMMANDS]),
}


def wrong_commands():
    """Each command of the file with its answer."""
    text = Path(__file__).with_name("surface.txt").read_text(encoding="utf-8")
    for placeholder, names in LISTS.items():
        text = text.replace(placeholder, names)
    return [tuple(block.rstrip().split("\n", 1)) for block in text.split("$ ")[1:]]


@pytest.fixture(scope="module")
def folder(model_folder, chat_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("surface")
    shutil.copytree(model_folder, folder / "model")
    shutil.copy(chat_file, folder / "chats.jsonl")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def typed(folder, monkeypatch, typed_here):
    """Types a command in ``folder``."""
    monkeypatch.chdir(folder)
    return typed_here


def content(folder):
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_a_wrong_command_says_what_is_wrong_and_writes_nothing(folder, typed):
    before = content(folder)
    for command, answer in wrong_commands():
        status, out, err = typed(command)
        assert (status, err) == (2, answer), (command, out)
        # What is found without slow imports comes before the line that says what is being done.
        assert not out or re.fullmatch("(fine-tuning|checking|scoring|sampling) .*", out), command
        assert answer.count("error: ") == 1 and "Traceback" not in answer
        assert content(folder) == before, command


@pytest.mark.parametrize("script", SCRIPTS[:3])
def test_help_of_a_script_lists_every_flag(script, typed):
    status, text, _ = typed(f"{script} --no_such_flag --help")
    assert status == 0 and text.startswith(f"usage: accelerate launch {script} [--config C] [--recipe R]")
    for name, info in FLAGS.items():
        assert f"\n  --{name} <" in text and f"\n      {info.description}\n" in f"{text}\n"


def test_help_of_kit_and_of_each_of_its_commands_says_what_it_is_for(typed):
    assert typed("kit --version")[:2] == (0, f"kit {__version__}")
    status, text, _ = typed("kit --help")
    assert status == 0 and text.startswith("usage: kit <command> [--help], or kit --version\n")
    assert [line.split()[0] for line in text.split("\n\n")[1].splitlines()] == list(meanings())
    for name in COMMANDS:
        status, text, _ = typed(f"kit {name} --help")
        assert status == 0 and text.startswith(f"usage: kit {name} ")
        assert meanings()[name].lower() in " ".join(text.split()).lower() or name == "verify-resume"  # which says more
