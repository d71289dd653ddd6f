"""The order of the modules, read from their imports: what may know what."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A module imports from its own line or those above, never from below.
LAYERS = [
    ["errors", "secrets", "durable", "lock"],
    ["config", "contradictions", "foreign", "command_line", "topology", "schedule"],
    [
        *["archives", "records", "files", "tables", "hub", "messages", "formats", "sources"],
        *["cache", "template", "turns", "chat", "encoder", "tokenise", "samples"],
        *["packing", "order", "batches", "feed", "stream", "places", "loss", "attention"],
    ],
    ["data", "adapter", "model", "optim"],
    ["launch", "exits", "strategy"],
    ["checkpoint"],
    ["step", "evaluate", "saver", "export", "drift", "log", "run", "stop", "replicas", "watch"],
    ["page"],
    ["plan", "doctor", "checks", "inspect", "report", "compare_runs", "verify_resume", "memory"],
    ["advice"],
    ["cli"],
]
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
PEERS = LAYERS[6]  # composed by the recipes, and unknown to each other
LIGHT = ["errors", "secrets", "config", "command_line", "topology", "lock", "launch", "exits", "schedule"]
HEAVY = ["torch", "transformers", "accelerate", "peft", "datasets", "bitsandbytes", "numpy"]

MODULES = {path.stem: ast.parse(path.read_text()) for path in (ROOT / "kit").glob("*.py")}
RECIPES = {path.stem: ast.parse(path.read_text()) for path in (ROOT / "recipes").glob("*.py")}


def running(tree, at_import_only=False):
    """All nodes that run, without blocks for the type checker only; or only those that run at import."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
            continue
        if at_import_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield node
        nodes += ast.iter_child_nodes(node)


def imported(tree, at_import_only=False):
    """Full names of what is imported: ``kit.data.open`` for ``from kit import data`` too."""
    for node in running(tree, at_import_only):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide the order"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_from_kit(tree):
    parts = [name.split(".") for name in imported(tree)]
    return {part[1] for part in parts if part[0] == "kit" and part[1] in MODULES}


def words(tree):
    """Names, attributes and whole strings that the code uses; docstrings are whole strings no word equals."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword | ast.arg):
            yield node.arg or ""
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_module_has_its_place_in_the_order():
    assert set(MODULES) - {"__init__"} <= set(LAYER_OF)


@pytest.mark.parametrize("name", sorted(set(MODULES) & set(LAYER_OF)))
def test_no_module_imports_one_below_it(name):
    below = {other for other in imported_from_kit(MODULES[name]) if LAYER_OF[other] > LAYER_OF[name]}
    assert not below


@pytest.mark.parametrize("name", PEERS)
def test_the_parts_of_a_run_do_not_import_each_other(name):
    assert not imported_from_kit(MODULES[name]) & set(PEERS)


def test_imports_never_go_in_a_circle():
    seen = set()

    def visit(name, path):
        assert name not in path, " -> ".join([*path, name])
        if name not in seen:
            for other in imported_from_kit(MODULES[name]):
                visit(other, [*path, name])
            seen.add(name)

    for name in MODULES:
        visit(name, [])


def test_the_kit_knows_no_recipe_and_recipes_do_not_know_each_other():
    for name, tree in MODULES.items():
        assert not [other for other in imported(tree) if other.split(".")[0] in ("recipes", *RECIPES)], name
    for name, tree in RECIPES.items():
        assert not [other for other in imported(tree) if other.split(".")[0] in ("recipes", *RECIPES)], name


@pytest.mark.parametrize("name", sorted({*MODULES, *RECIPES} - {"strategy"}))
def test_only_strategy_knows_what_accelerate_calls_a_strategy(name):
    tree = MODULES.get(name) or RECIPES[name]
    assert not {"DistributedType", "fsdp_plugin", "is_fsdp2", "distributed_type"} & set(words(tree)) - (
        {"distributed_type"} if name in ("topology", "launch") else set()  # a key of the config file
    )


@pytest.mark.parametrize("name", sorted({*MODULES, *RECIPES} - {"strategy", "launch"}))
def test_only_launch_and_strategy_read_what_launchers_leave_in_the_environment(name):
    tree = MODULES.get(name) or RECIPES[name]
    variable = r"(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    variable += r"|(ACCELERATE|FSDP|PARALLELISM_CONFIG|MEGATRON_LM)_\w*"
    strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    assert not [text for text in strings if re.fullmatch(variable, text)]


@pytest.mark.parametrize("name", LIGHT)
def test_what_answers_a_mistyped_flag_imports_nothing_slow(name):
    assert not {module.split(".")[0] for module in imported(MODULES[name], at_import_only=True)} & set(HEAVY)


def test_reading_a_command_loads_no_torch():
    """Also not through something else."""
    code = f"import sys, {', '.join(f'kit.{name}' for name in LIGHT)}; print(*set(sys.modules) & set({HEAVY}))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""


def test_the_training_script_can_be_read_in_one_sitting():
    assert len((ROOT / "recipes/finetune.py").read_text().splitlines()) <= 200
