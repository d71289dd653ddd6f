"""Who may know what, read from the imports: the order is declared once, in docs/architecture.py."""

import ast
import re
import runpy
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, typed

from kit.config.settings.objective import DECLARED

PLAN = runpy.run_path(str(ROOT / "docs/architecture.py"))
FLOORS = PLAN["FLOORS"]
TOOLS = {name for names in PLAN["TOOLS"] for name in names}
imported, arrows = PLAN["imported"], PLAN["arrows"]
MODULES = PLAN["modules"]()
RECIPES = {path.stem: ast.parse(path.read_text()) for path in (ROOT / "recipes").glob("*.py")}

# Answer a mistyped flag, so they are imported before anything slow is.
LIGHT = """
system.visible system.interrupt system.errors system.credentials system.console system.lock schema.fields tasks.spec
tasks.grpo.spec config.paths config.dataset_entry config.recipe config.recipe_file config.validation
config.conflicts config.hints config.other_kits config.command_line strategy.topology strategy.accelerate_config
strategy.processes.launcher strategy.launch.launch failures.exits system.phases preflight.inputs preflight.packages
train.schedule tools.doctor.result cli.doctor cli.main
""".split()
HEAVY = ["torch", "transformers", "accelerate", "peft", "datasets", "bitsandbytes", "numpy"]


def floor_of(floors):
    return {name: number for number, names in enumerate(floors) for name in names}


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


def test_every_package_has_its_floor_and_every_floor_only_what_exists():
    for package, floors in FLOORS.items():
        folder = ROOT / package.replace(".", "/")
        paths = [path for path in folder.iterdir() if path.is_dir() or path.suffix == ".py"]
        names = {path.stem for path in paths if not path.name.startswith("__")}
        names |= {PLAN["SPECS"].removeprefix("kit.")} if package == "kit" else set()
        assert sorted(floor_of(floors)) == sorted(names)


def test_nothing_is_imported_from_above_or_from_the_same_floor():
    for package, floors in FLOORS.items():
        floor = floor_of(floors)
        found = arrows(package.count(".") + 2, package)
        assert {(one, two) for one, two in found if floor[two] >= floor[one]} == set()


def test_no_script_needs_a_tool():
    """One module calls some of them where they are installed, in blocks that ``imported`` does not follow."""
    asking = [name for name, tree in MODULES.items() if "HAS_TOOLS" in set(words(tree))]
    assert asking == ["kit.optional_tools"]
    for script, tree in RECIPES.items():
        reached = PLAN["closure"](list(imported(tree)))
        assert "kit.config.recipe" in reached, script
        assert {name for name in reached if name.split(".")[1] in TOOLS} == set(), script


@pytest.mark.slow
def test_training_scoring_and_exporting_work_without_the_tools(tmp_path):
    clone = tmp_path / "clone"
    for name in ("kit", "recipes", "accelerate_configs"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in TOOLS:
        shutil.rmtree(clone / "kit" / name)

    def call(script, *flags):
        result = typed(f"recipes/{script}.py", *flags, cwd=clone, own_kit=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    flags = ["--method", "lora", "--max_steps", "2", "--max_eval_samples", "2", "--output_dir", "run"]
    assert "model: run/final" in call("finetune", *flags) and not (clone / "run/report.html").exists()
    call("score", "--model_name_or_path", "run/final", "--eval_dataset", "recipes/tiny/eval.jsonl")
    call("export", "run/final", "--output_dir", "merged")
    assert "Without kit/tools" in call("finetune", "--dry_run", "--output_dir", "other")


def test_imports_never_go_in_a_circle():
    """Neither modules, nor the parts of a package: its modules and the packages inside of it."""
    packages = {".".join(name.split(".")[:depth]) for name in MODULES for depth in range(1, name.count(".") + 1)}
    for package in packages:
        found = arrows(package.count(".") + 2, package)
        while found:
            imports = {one for one, _ in found}
            left = {(one, two) for one, two in found if two in imports}
            assert left != found, (package, sorted(found))
            found = left


def test_the_kit_knows_no_recipe_and_recipes_do_not_know_each_other():
    for name, tree in [*MODULES.items(), *RECIPES.items()]:
        assert not [other for other in imported(tree) if other.split(".")[0] in ("recipes", *RECIPES)], name


OUTSIDE = {name: tree for name, tree in {**MODULES, **RECIPES}.items() if not name.startswith("kit.strategy.")}


def test_only_the_strategy_package_knows_what_accelerate_calls_a_strategy():
    theirs = {"DistributedType", "fsdp_plugin", "is_fsdp2", "distributed_type"}
    assert {name: found for name, tree in OUTSIDE.items() if (found := theirs & set(words(tree)))} == {}


def test_only_tasks_and_the_words_of_other_kits_name_an_objective():
    names = set(DECLARED) - {"reward"}  # which is also a number of an answer
    found = {name for name, tree in MODULES.items() if names & set(words(tree))}
    others = {name for name in found if not name.startswith(("kit.tasks.", "kit.tools.convert."))}
    assert others == {"kit.config.settings.objective"}  # the list of them


def test_only_the_strategy_package_reads_what_launchers_leave_in_the_environment():
    variable = r"(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    variable += r"|(ACCELERATE|FSDP|PARALLELISM_CONFIG|MEGATRON_LM)_\w*"
    for name, tree in OUTSIDE.items():
        strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        # The console needs the rank before there is a strategy: one rank reports what is wrong with a command line.
        allowed = ["RANK"] if name in ("kit.system.console", "kit.system.interrupt") else []
        assert [text for text in strings if re.fullmatch(variable, text)] == allowed, name


def test_what_answers_a_mistyped_flag_imports_nothing_slow():
    for name in LIGHT:
        modules = imported(MODULES[f"kit.{name}"], at_import_only=True)
        assert not {module.split(".")[0] for module in modules} & set(HEAVY), name


@pytest.mark.slow
def test_reading_a_command_loads_no_torch():
    """Also not through something else."""
    code = f"import sys, {', '.join(f'kit.{name}' for name in LIGHT)}; print(*set(sys.modules) & set({HEAVY}))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""


def test_the_training_script_does_not_ask_which_process_it_is():
    assert "is_main_process" not in set(words(RECIPES["finetune"]))  # the functions that print or write ask it


def test_the_surroundings_of_a_run_call_no_model_and_no_evaluation():
    """The order of events is read in the script."""
    calls = {"kit.train.step.train_step", "kit.train.policy.build_policy", "kit.evaluate.evaluate"}
    assert {"kit.train.step.train_step", "kit.evaluate.evaluate"} < set(imported(RECIPES["finetune"]))
    for name, tree in MODULES.items():
        assert not name.startswith("kit.run.") or not calls & set(imported(tree)), name
