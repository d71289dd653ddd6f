"""The README and docs tell the truth about what can be typed."""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from helpers import ROOT, WORDS, typed

from kit.cli.main import COMMANDS
from kit.config.command_line import read_command_line
from kit.config.commands import COMMANDS as SCRIPTS
from kit.config.paths import ACCELERATE_CONFIGS
from kit.config.recipe import Recipe
from kit.tools.plan.request import OWN, read_plan_request

MADE = {"two.yaml"}  # docs/multi-node-and-debugging.md shows how to make it
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands():
    for page in PAGES:
        for kind, block in re.findall(r"```(bash|text)\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", "").replace("$rate", "1e-4").splitlines():
                command = line.split(" #")[0].strip()
                shown = command.startswith("kit ") and "..." not in command  # among other text
                if shown if kind == "text" else command and not command.startswith("#"):
                    yield page.name, command
    for command in re.findall(r"\| `(kit train .*?)` \|", (ROOT / "README.md").read_text()):
        yield "README.md", command


def test_every_command_parses(tmp_path, monkeypatch):
    (tmp_path / "my_tasks").mkdir()
    for page, command in commands():
        check(command, f"{page}: {command}", tmp_path, monkeypatch)


def check(command, where, tmp_path, monkeypatch):
    for part in command.split(" && "):
        words = shlex.split(part)
        if words[0] == "kit":
            assert words[1] in (*SCRIPTS, *COMMANDS) or words[1].startswith("--"), where
        if words[:2] == ["kit", "plan"]:
            read_plan_request(words[2:])
        if words[:2] == ["kit", "train"]:
            words[:2] = ["recipes/finetune.py"]
        if words[:2] == ["kit", "score"]:
            words[:2] = ["recipes/score.py"]
        script = next((word for word in words if re.fullmatch(r"recipes/\w+\.py", word)), None)
        if words[:2] in (["kit", "doctor"], ["kit", "inspect"], ["kit", "verify-resume"]):
            flags = re.sub(r" (-n|--html|--timeout) \S+| --json", "", part).split()[2:]
            assert not read_command_line(flags).problems, where
        if script is None:
            continue
        assert (ROOT / script).is_file(), where
        flags = words[words.index(script) + 1 :]
        if script == "recipes/export.py":
            continue
        positional = ("model_name_or_path", "eval_dataset") if script == "recipes/score.py" else ()
        request = read_command_line(flags, stands_for={"eval_dataset": "dataset"}, positional=positional)
        assert not request.problems, where
        before = words[: words.index(script)]
        for word in before:
            assert not word.endswith(".yaml") or word in MADE or (ROOT / word).is_file(), where
        if request.launch.config and request.launch.config not in MADE:
            assert (ACCELERATE_CONFIGS / f"{request.launch.config.removesuffix('.yaml')}.yaml").is_file(), where


# Flags in the pages that the kit's own parsers do not name in quotes, most of them of other programs.
OTHERS = """
config_file jinja machine_rank nnodes rdzv_endpoint prefix pid signal signals model_args tasks apply_chat_template
enable lora mm max require no plain flavor secrets skip_memory_check quiet image audio hf
""".split()


def test_every_flag_named_in_the_pages_exists():
    sources = [path.read_text() for top in ("kit", "recipes", "benchmarks") for path in (ROOT / top).rglob("*.py")]
    known = {*Recipe.model_fields, *OWN, *OTHERS, *re.findall(r'"--([a-z][a-z0-9_]*)"', "".join(sources))}
    for page in PAGES:
        for name in re.findall(r"--([a-z][a-z0-9_]*)", page.read_text()):
            assert name in known, f"{page.name}: --{name}"


def test_the_changes_that_the_architecture_page_shows_fit():
    """What a diff shows of a file stands there exactly once: as it was, or as it is for who has followed the page."""
    page = (ROOT / "docs/architecture.md").read_text()
    blocks = re.findall(r"^`([\w./-]+)`:\n\n```diff\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == page.count("```diff\n")
    stale = []
    for path, body in blocks:
        text = (ROOT / path).read_text()
        old, new = ("\n".join(line[1:] for line in body.splitlines() if line[:1] != sign) for sign in "+-")
        if 1 not in (text.count(old), text.count(new)):
            stale.append(f"{path}:\n{old}")
    assert not stale, "docs/architecture.md shows these lines otherwise than they are now:\n\n" + "\n\n".join(stale)


def test_the_readme_quotes_the_loop_as_it_is():
    """Each line but ``...``, in the same order and depth; so much of a line as stands before ``...``."""
    code = re.search(r"```python\n(while True:\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    loop = iter((ROOT / "recipes/finetune.py").read_text().partition("    while True:\n")[2].splitlines())
    for line in code.splitlines()[1:]:
        quoted = f"    {line.partition('...')[0]}"
        assert not quoted.strip() or any(each.startswith(quoted) for each in loop), line


def test_the_badges_are_facts():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (bound for bound in project["dependencies"] if bound.startswith("torch>="))
    oldest, major, minor = re.fullmatch(r"torch>=(\d+\.\d+),<(\d+)\.(\d+)", torch).groups()
    badges = re.findall(r"!\[([^]]*)\]\(https://img\.shields\.io/badge/(\S+)\)", (ROOT / "README.md").read_text())
    newest, python = f"{major}.{int(minor) - 1}", project["requires-python"].removeprefix(">=")
    assert badges == [
        (f"Python {python} or later", f"python-%E2%89%A5_{python}-3776ab"),
        (f"torch {oldest} to {newest}", f"torch-{oldest}_to_{newest}-ee4c2c"),
        (f"License: {project['license']}", f"license-{project['license'].replace('-', '--')}-green"),
    ]


# Blocks that are part of a file; and one that test_api.py runs.
PARTS = ("README.md", "architecture.md", "quickstart.md")
MORE = {
    "after-training.md": ("", 'assert close("about 10", "it is 10.5", {}) == 1'),
    "reward-classify-embed.md": (
        "",
        'assert model.config.id2label == {0: "food", 1: "staff"} and model.score.out_features == 2',
    ),
    "grpo.md": ("", 'assert judge("", "red", {"messages": [{"role": "user", "content": "blue"}, {}]}) != 0'),
}


@pytest.mark.slow
def test_the_python_of_the_pages_runs(finetune, model_folder, tmp_path, monkeypatch):
    """On adapters of a judge and of a classifier, and the judge as a reward."""
    monkeypatch.chdir(tmp_path)
    finetune.folder = tmp_path / "runs"
    finetune.folder.mkdir()
    pairs = [{"prompt": [{"role": "user", "content": w}], "chosen": f"{w} red", "rejected": w} for w in WORDS]
    labelled = [{"text": w, "label": ("food", "staff")[i % 2]} for i, w in enumerate(WORDS)]
    for name, objective, rows in (("judge", "reward", pairs), ("topics", "classify", labelled)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        finetune.ok(name, objective=objective, dataset=f"{name}.jsonl", max_steps=2)
    for page in PAGES:
        for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            if page.name in PARTS:
                continue
            before, after = MORE.get(page.name, ("", ""))
            script = tmp_path / f"{page.stem}.py"
            script.write_text(f"{before}{code}\n{after}\n".replace('"BASE"', repr(str(model_folder))))
            done = typed(str(script), cwd=tmp_path)
            assert done.returncode == 0, page.name + done.stderr
    assert {"after-training", "grpo", "models", "reward-classify-embed"} <= {
        path.stem for path in tmp_path.glob("*.py")
    }
    of_judge = {"objective": "grpo", "rewards": f"{tmp_path}/grpo.py:judge", "num_generations": 4, "max_steps": 1}
    run = finetune.ok("grpo", **of_judge, max_new_tokens=8)
    assert run.rows[0]["reward"] != 0, run.output


@pytest.mark.slow
def test_the_quickstart_can_be_typed(tmp_path):
    """Each block of bash in the order of the page, with the embedded model."""
    for block in re.findall(r"```bash\n(.*?)```", (ROOT / "docs/quickstart.md").read_text(), re.DOTALL):
        before, kit, words = block.strip().rpartition("kit ")
        if not kit:
            subprocess.run(["bash", "-ec", block], cwd=tmp_path, check=True)
            continue
        piped = shlex.split(before)[1] if before else ""  # echo TEXT | kit chat
        done = typed("-m", "kit.cli.main", *shlex.split(words), cwd=tmp_path, text=piped, timeout=600)
        assert done.returncode == 0, block + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()]
    untrained, trained = [row["eval_exact_match"] for row in rows if "eval_exact_match" in row]
    assert untrained == 0 and trained > 0.5  # it depends on the CPU: 0.75 to 1
    assert all(
        (tmp_path / made).exists() for made in ("look.html", "runs/first/report.html", "merged/model.safetensors")
    )


@pytest.mark.slow
@pytest.mark.long
def test_commands_with_embedded_models_run(tmp_path):
    """All in one folder, after README's first command; training for two steps."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    chosen = [("README.md", "kit train")]
    for page, command in commands():
        if page != "quickstart.md" and re.match(r"kit (?!plan).*--recipe tiny|kit (cache|train --output_dir)", command):
            chosen.append((page, command))
    assert len(chosen) > 12
    for page, command in chosen:
        words = shlex.split(command)[1:]
        if words[0] == "train" and "--max_steps" not in words:
            words += ["--max_steps", "2", "--max_eval_samples", "2"]
        done = typed("-m", "kit.cli.main", *words, cwd=tmp_path, timeout=600)
        assert done.returncode == 0, f"{page}: {command}\n{done.stderr}"
