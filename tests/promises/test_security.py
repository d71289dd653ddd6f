"""What comes from outside is never run, and what is secret never leaves: pickles, code, templates, credentials."""

import ast
import json
import os
import pickle
import re
import shutil
import time
from functools import partial

import pyarrow
import pytest
import torch
from data_helpers import byte_level_tokenizer, open_all, pairs, write
from helpers import ROOT, run_ranks, typed
from safetensors import safe_open

from kit.checkpoint.manifest import find_checkpoint, list_checkpoints
from kit.config.command_line import read_command_line
from kit.config.recipe import Recipe
from kit.data.chat.shipped import SHIPPED
from kit.failures import exits
from kit.model.build import build_meta_model, build_model, check_model, open_config
from kit.model.load_plan import LoadPlan
from kit.model.pretrained.tokenizer import open_tokenizer
from kit.system.console import say
from kit.system.errors import UserError, raise_if

EXTRAS = (
    ".metadata",
    "optimizer.bin",
    "random_states_0.pkl",
    "pytorch_model.bin",
    "scheduler.bin",
    "training_args.bin",
)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return exec, (f"open({str(self.marker)!r}, 'w').close()",)


@pytest.fixture
def marker(tmp_path):
    """Written by whatever runs; a test that leaves it there has failed."""
    path = tmp_path / "marker"
    yield path
    assert not path.exists()


@pytest.fixture
def bomb(marker):
    return pickle.dumps(Bomb(marker))


@pytest.fixture
def code(marker):
    """Python that does what the bomb does."""
    return f"open({str(marker)!r}, 'w').close()\n"


def put(folder, content, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def test_a_bomb_goes_off_where_it_is_unpickled(tmp_path):
    """Else none of these tests could fail."""
    pickle.loads(pickle.dumps(Bomb(tmp_path / "one")))
    torch.save(Bomb(tmp_path / "two"), tmp_path / "two.bin")
    torch.load(tmp_path / "two.bin", weights_only=False)
    assert (tmp_path / "one").exists() and (tmp_path / "two").exists()


# Model folders


def open_model(folder, **settings):
    """As a run opens it: tokenizer, config, checks, weights."""
    recipe = Recipe(model_name_or_path=str(folder), dataset="none", max_length=8, method="full", **settings)
    open_tokenizer(recipe)
    config = open_config(recipe)
    raise_if(check_model(recipe, config, build_meta_model(recipe, config), max_length=recipe.max_length))
    return build_model(recipe, config, LoadPlan(compute_dtype="float32", device="cpu"))


@pytest.fixture
def folder(model_folder, tmp_path):
    return shutil.copytree(model_folder, tmp_path / "model")


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_pickles_beside_the_weights_are_not_opened(folder, bomb, marker):
    put(folder, bomb, *EXTRAS, "adapter_model.bin", "rng_state.pth", "vocab.pkl", "tokenizer.pkl", "model.pt")
    put(folder, bomb, "generation_config.json")
    torch.save(Bomb(marker), folder / "pytorch_model.bin")
    assert open_model(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_pickle_instead_of_a_file_is_refused(name, folder, bomb):
    put(folder, bomb, name)
    with pytest.raises(UserError, match="model"):
        open_model(folder)


def test_pickled_weights_only_are_refused_with_what_to_do(folder, marker):
    (folder / "model.safetensors").unlink()
    torch.save(Bomb(marker), folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin in .*expected \*.safetensors\n.*pickled .* never opened"):
        open_model(folder)


@pytest.mark.parametrize("harmless", [False, True], ids=["bomb", "weights"])
@pytest.mark.parametrize("by", ["index", "config", "adapter"])
def test_no_other_file_can_name_pickled_weights(by, harmless, folder, marker):
    """Not even those that torch would unpickle in safety: ``use_safetensors`` asks for the first file only."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    torch.save(state if harmless else Bomb(marker), folder / "adapter_model.bin")
    if by == "index":
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        shards = {name: "part.safetensors" for name in state} | {"lm_head.weight": "adapter_model.bin"}
        put(folder, json.dumps({"metadata": {}, "weight_map": shards}), "model.safetensors.index.json")
    elif by == "config":
        change_json(folder / "config.json", transformers_weights="adapter_model.bin")
    else:
        adapter = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "x"}
        put(folder, json.dumps(adapter), "adapter_config.json")
    with pytest.raises(UserError, match="adapter_model"):
        open_model(folder)


def test_an_adapter_beside_the_weights_is_not_put_into_them_unasked(folder):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(folder)
    with pytest.raises(UserError, match=r"contains an adapter too.*\n.*--adapter_name_or_path"):
        open_model(folder)


READ_FIRST = r"custom code(.|\n)*--trust_remote_code true runs the model's own code: read it first"
OWN_CLASSES = {"AutoConfig": "modeling_x.Config", "AutoModelForCausalLM": "modeling_x.Model"}


def with_own_model(folder, code):
    put(folder, code, "modeling_x.py")
    change_json(folder / "config.json", model_type="x", auto_map=OWN_CLASSES)


def with_own_tokenizer(folder, code):
    put(folder, code, "tokenization_x.py")
    tokenizers = {"AutoTokenizer": ["tokenization_x.Slow", "tokenization_x.Fast"]}
    change_json(folder / "tokenizer_config.json", tokenizer_class="Slow", auto_map=tokenizers)


@pytest.mark.parametrize("change", [with_own_model, with_own_tokenizer])
def test_code_of_a_model_is_not_run_unless_asked_to(change, folder, code, monkeypatch, tmp_path):
    change(folder, code)
    with pytest.raises(UserError, match=READ_FIRST):
        open_model(folder)
    (tmp_path / "asked").mkdir()
    with pytest.raises(UserError):  # it is run, and has none of the classes
        change(folder, code.replace("marker", "asked/marker"))
        open_model(folder, trust_remote_code=True)
    assert (tmp_path / "asked/marker").exists()


def test_code_that_nobody_needs_is_not_run(folder, code):
    put(folder, code, "modeling_x.py", "custom_generate/generate.py", "__init__.py", "llama.py", "setup.py")
    change_json(folder / "config.json", auto_map=OWN_CLASSES, _attn_implementation="some/kernel:fn")
    change_json(folder / "generation_config.json", custom_generate="some/repository")
    model = open_model(folder)
    assert type(model).__module__.startswith("transformers.models.llama")
    model.generate(torch.tensor([[1, 2]]), max_new_tokens=2)


ESCAPES = {
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__['os'].system('touch MARKER') }}",
    "function": "{{ raise_exception.__globals__['__builtins__']['open']('MARKER', 'w') }}",
    "method": "{{ strftime_now.__func__.__globals__['os'].system('touch MARKER') }}",
    "attr": "{{ (''|attr('__class__')|attr('__mro__'))[1] }}",
    "format": "{{ '{0.__class__.__mro__[1].__subclasses__}'.format('') }}",
    "self": "{{ self.__init__.__globals__['__builtins__'] }}",
    "change": "{{ messages.append(messages[0]) }}",
    "import": "{% import 'os' as os %}{{ os.system('touch MARKER') }}",
    "include": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("escape", ESCAPES)
def test_a_chat_template_cannot_leave_its_sandbox(escape, marker, tmp_path):
    source = SHIPPED["chatml"].source + ESCAPES[escape].replace("MARKER", str(marker))
    (tmp_path / "mine.jinja").write_text(source)
    write(tmp_path / "train.jsonl", {"messages": [{"role": "user", "content": "Hi"}, *ANSWER]})
    with pytest.raises(UserError, match=r"the template fails|not a Jinja template"):
        settings = {"chat_template": str(tmp_path / "mine.jinja"), "dataset_num_proc": 1}
        open_all(byte_level_tokenizer(), dataset=str(tmp_path / "train.jsonl"), **settings)


ANSWER = [{"role": "assistant", "content": "Hello"}]


@pytest.mark.slow
def test_scoring_and_merging_run_no_code_of_a_model(finetune, folder, code, chat_file, tmp_path):
    adapter = finetune.ok("run", model_name_or_path=folder, max_steps=1).folder / "final"
    with_own_model(folder, code)
    train = finetune("again", model_name_or_path=folder)
    base = finetune.score("base", model_name_or_path=folder, eval_dataset=chat_file)
    adapted = finetune.score("adapted", model_name_or_path=adapter, eval_dataset=chat_file)
    run_ranks("export", [str(adapter), f"--output_dir={tmp_path / 'merged'}"], 1, tmp_path / "export.log")
    said = [train.output, base.output, adapted.output, (tmp_path / "export.log").read_text()]
    assert [train.status, base.status, adapted.status, (tmp_path / "export.status").read_text()] == [2, 2, 2, "2"], said
    for text in said:
        assert "Traceback" not in text and re.search(READ_FIRST, text), text
    assert not (tmp_path / "merged").exists() and not train.folder.exists()


# Data


GOOD = json.dumps({"prompt": "Hi ", "completion": "Hello"}) + "\n"


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv", "d.parquet", "d.arrow", "d.jsonl.gz", "d.zip"])
def test_a_pickle_with_the_name_of_data_is_refused(name, bomb, tmp_path):
    put(tmp_path, bomb, name)
    with pytest.raises(UserError, match=re.escape(name)):
        open_all(byte_level_tokenizer(), dataset=str(tmp_path / name), dataset_num_proc=1)


def test_pickles_and_scripts_beside_the_data_are_passed_over(bomb, code, tmp_path):
    folder = tmp_path / "data"
    put(folder, bomb, "data.pkl", "data.pickle", "data.npy", "data.pt", "dataset_infos.json", "dataset_info.json")
    put(folder, code, "data.py", "__init__.py", "conftest.py")
    put(folder, "---\nconfigs:\n- config_name: default\n  data_files: data.pkl\n---\n", "README.md")
    with pytest.raises(UserError, match="without data files"):
        open_all(byte_level_tokenizer(), dataset=str(folder))
    write(folder / "train.jsonl", *pairs(3))
    put(folder, bomb, "train.zip")
    assert len(open_all(byte_level_tokenizer(), dataset=str(folder), dataset_num_proc=1).train) == 3


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
def test_a_pickle_in_a_saved_data_set_is_refused(name, bomb, tmp_path):
    from datasets import Dataset

    Dataset.from_list(pairs(3)).save_to_disk(str(tmp_path / "saved"))
    put(tmp_path / "saved", bomb, name)
    read = partial(open_all, byte_level_tokenizer(), dataset=str(tmp_path / "saved"), dataset_num_proc=1)
    if name.endswith(".json"):  # nothing reads it
        assert len(read().train) == 3
        return
    with pytest.raises(UserError, match="saved"):
        read()


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
@pytest.mark.parametrize("type_name", ["arrow.py_extension_type", "pandas.period"])
def test_a_pickled_type_in_a_table_is_not_opened(suffix, type_name, bomb, tmp_path):
    """Arrow once unpickled the description of an extension type when it read a schema."""
    from pyarrow import parquet

    metadata = {"ARROW:extension:name": type_name, "ARROW:extension:metadata": bomb}
    field = pyarrow.field("text", pyarrow.string(), metadata=metadata)
    table = pyarrow.table([["one two", "three"]], schema=pyarrow.schema([field], metadata={"pandas": bomb}))
    path = tmp_path / f"train.{suffix}"
    if suffix == "parquet":
        parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write(table)
    assert len(open_all(byte_level_tokenizer(), dataset=str(path), dataset_num_proc=1).train) == 2


# Checkpoints and adapters


@pytest.mark.slow
def test_a_checkpoint_with_pickles_goes_on_without_them_or_is_refused(finetune, bomb, tmp_path, model_folder):
    run = finetune.ok("run", max_steps=2, save_steps=1)
    older, newer = list_checkpoints(run.folder / "checkpoints")
    for folder in (older, newer):
        put(folder, bomb, *EXTRAS, "__0_0.distcp")
    put(run.folder / "final", bomb, *EXTRAS, "adapter_model.bin")

    shard = next(newer.glob("*.safetensors")).name
    for name in ("state.json", "manifest.json", shard):
        copy = shutil.copytree(run.folder / "checkpoints", tmp_path / name)
        put(copy / newer.name, bomb, name)
        said = []
        assert find_checkpoint(copy, "auto", said.append) == copy / older.name
        assert name in said[0] and "skipping" in said[0]
        with pytest.raises(UserError, match=name):
            find_checkpoint(copy, str(copy / newer.name), said.append)
        named = finetune("run", max_steps=3, resume_from_checkpoint=copy / newer.name)
        assert named.status == 2 and "Traceback" not in named.output, named.output

    assert f"continuing after step 2 of 3 ({newer})" in finetune.ok("run", max_steps=3).output
    put(run.folder / "final", bomb, *EXTRAS, "adapter_model.bin")
    finetune.ok("more", adapter_name_or_path=run.folder / "final", max_steps=1)
    (run.folder / "final/adapter_model.safetensors").unlink()
    more = finetune("other", adapter_name_or_path=run.folder / "final", max_steps=1)
    assert more.status == 2 and "pickled weights are never opened" in more.output


# Credentials


def test_no_setting_that_holds_a_credential_is_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "n0t-for-you")
    (tmp_path / "mine.yaml").write_text("model_name_or_path: m\ndataset:\n  - path: a.jsonl\n    name: n0t-for-you\n")
    cases = {
        "--output_dir": ["--output_dir", "runs/n0t-for-you"],
        "--dataset": ["--dataset=https://me:password@host/d.jsonl"],
        "--learning_rate": ["--learning_rate", "n0t-for-you"],
        "--recipe": ["--recipe", "n0t-for-you.yaml"],
        "mine.yaml:2 dataset": ["--recipe", str(tmp_path / "mine.yaml")],
    }
    for place, words in cases.items():
        request = read_command_line(words)
        (problem,) = request.problems
        assert problem.where.endswith(place) and "***" in problem.found, words
        assert "n0t-for-you" not in str(problem) and "password" not in str(problem)
        assert request.recipe is None
    assert not read_command_line(["--output_dir", "runs/mine"]).problems


@pytest.mark.slow
@pytest.mark.parametrize("error", [UserError, RuntimeError])
def test_neither_errors_nor_tracebacks_show_a_secret(error, monkeypatch, capsys):
    from kit.system.errors import Problem

    monkeypatch.setenv("HF_TOKEN", "n0t-for-you")
    monkeypatch.setattr(os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    text = "GET https://me:password@host/a with n0t-for-you"
    with pytest.raises(SystemExit) as ended, exits.reporting_errors():
        raise UserError(Problem("dataset", text)) if error is UserError else RuntimeError(text)
    say(text)
    out, err = capsys.readouterr()
    assert ended.value.code == (2 if error is UserError else 1)
    assert ("Traceback" in err) == (error is RuntimeError)
    for said in (out, err):
        assert "GET https://***@host/a with ***" in said and "n0t-for" not in said


@pytest.mark.slow
@pytest.mark.long
def test_nothing_that_a_run_leaves_or_says_holds_a_secret(model_folder, chat_file, tmp_path):
    secrets = {"HF_TOKEN": "hfCanaryAAAA1", "WANDB_API_KEY": "wbCanaryBBBB2", "MY_SECRET": "myCanaryCCCC3"}
    env = secrets | {"KIT_CACHE": str(tmp_path / "cache")}
    shown = " ".join(secrets.values())
    write(
        tmp_path / "eval.jsonl",
        *[{"messages": [{"role": "user", "content": f"{shown} {i}"}, *ANSWER]} for i in range(2)],
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"It is {shown}"}]},
    )
    named = tmp_path / "data" / f"{secrets['MY_SECRET']}.jsonl"  # nobody names this file
    named.parent.mkdir()
    shutil.copy(chat_file, named)
    time.sleep(2.5)  # what is younger is not remembered in the cache
    model = [f"--model_name_or_path={model_folder}", "--max_length=256"]
    flags = [*model, f"--output_dir={tmp_path / 'run'}", "--global_batch_size=4"]
    flags += ["--report_to=tensorboard", "--save_steps=1", "--eval_steps=1"]
    evaluation = [f"--eval_dataset={tmp_path / 'eval.jsonl'}", "--predict_with_generate", "--max_new_tokens=4"]
    said = []

    def call(*words, status=0):
        done = typed(*words, env=env)
        assert done.returncode == status, done.stdout + done.stderr
        said.append(done.stdout + done.stderr)
        return said[-1]

    start = ["recipes/finetune.py", *flags, *evaluation]
    assert "prompt   <|im_start|>user *** *** ***" in call(*start, f"--dataset={named.parent}", "--max_steps=1")
    assert "continuing after step 1" in call(*start, f"--dataset={named.parent}", "--max_steps=2")
    assert "*** *** ***" in (tmp_path / "run/report.html").read_text()
    inspect = [
        "inspect",
        *model,
        f"--dataset={tmp_path / 'eval.jsonl'},{named.parent}",
        "-n99",
        f"--html={tmp_path / 'run/look.html'}",
    ]
    assert "It is *** *** ***" in call("-m", "kit.cli.main", *inspect) and "data/***.jsonl:" in said[-1]
    for path in (named, f"https://me:{secrets['HF_TOKEN']}@host/d.jsonl"):
        assert "a credential in" in call(*start, f"--dataset={path}", status=2)
    put(named.parent, '{"messages": ', named.name)
    assert "***.jsonl:1: not JSON" in call(*start, f"--dataset={named.parent}", status=2)
    final = str(tmp_path / "run/final")
    assert "expected" in call("recipes/score.py", f"--model_name_or_path={final}", *evaluation)
    call("recipes/export.py", final, f"--output_dir={tmp_path / 'run/merged'}")

    files = [path for root in ("run", "cache") for path in (tmp_path / root).rglob("*") if path.is_file()]
    assert {"run.json", "metrics.jsonl", "README.md", "adapter_config.json", "report.html", "look.html"} <= {
        path.name for path in files
    } and any("tfevents" in path.name for path in files)
    left = {str(path): path.read_bytes() for path in files} | {f"output {i}": s.encode() for i, s in enumerate(said)}
    for name, content in left.items():
        text = re.sub(rb"<[^>]*>", b"", content) if name.endswith(".html") else content
        assert b"Canary" not in text and "Canary" not in name, name


# The source


SOURCES = {str(path.relative_to(ROOT)): path for top in ("kit", "recipes") for path in (ROOT / top).rglob("*.py")}
PICKLING = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
# Also: `kit.strategy.launch` becomes torchrun by os.execve, from a list of words. Processes of one run pickle what they
# send each other (multiprocessing, gather_object); none of it comes from outside.
NO_MODULES = PICKLING | {"code", "codeop", "runpy", "imp"}
NO_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "torch.load",
    "torch.save",
    "np.load",
}
NO_CALLS |= {"importlib.import_module", "import_module", "jinja2.Environment", "jinja2.Template", "yaml.load_all"}
ALLOWED = {
    "kit/cli/main.py": ["import_module"],  # one of its own commands, after a look into their list
    "kit/data/samples/samples.py": ["pickle"],  # rows that the process itself wrote, in a file without a name
    "kit/data/kinds/kinds.py": ["import_module"],  # of a task's spec, which is code of the kit
    "kit/model/build.py": ["trust_remote_code=trust_remote_code"],  # what its caller passes on from the settings
    "kit/model/__init__.py": ["import_module"],  # of two libraries, to see whether they load
    "kit/model/media/kinds.py": ["import_module"],  # of three libraries that it names
    "kit/train/optim/optim.py": ["importlib.import_module"],  # of OPTIMISERS, which is code of the kit
    "recipes/tiny-tools/make.py": ["runpy"],  # of three files beside it
}
YAML_LOADERS = {"yaml.BaseLoader", "yaml.SafeLoader"}  # tests/config/test_recipe_file.py holds both to plain values


def test_the_source_unpickles_runs_and_trusts_nothing():
    found = {name: suspicious(path) for name, path in SOURCES.items()}
    assert {name: calls for name, calls in found.items() if calls} == ALLOWED


def suspicious(path):
    """What the source of a file imports, calls or passes that could run what it reads."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in NO_MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if (node.module or "").split(".")[0] in NO_MODULES else []
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            loaders = {ast.unparse(argument) for argument in [*node.args[1:], *(k.value for k in node.keywords)]}
            is_safe_yaml = called == "yaml.load" and loaders and loaders <= YAML_LOADERS
            found += [called] if called in NO_CALLS or (called == "yaml.load" and not is_safe_yaml) else []
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "yaml":
            is_loader = re.search("Loader|(full|unsafe)_load", node.attr)
            found += [ast.unparse(node)] if is_loader and ast.unparse(node) not in YAML_LOADERS else []
        elif isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle", "weights_only"):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            found += [] if ast.unparse(node.value) == "settings.trust_remote_code" else [ast.unparse(node)]
    return found
