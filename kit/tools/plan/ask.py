"""Read the command line of ``kit plan``: what is to be planned, for which GPUs.

The flags of ``recipes/finetune.py`` mean what they mean there. Those of ``OWN`` are of this command.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from kit.config.adapter_base import adapter_config
from kit.config.command_line import Request, read_command_line
from kit.config.hints import recipe_names
from kit.config.recipe import RECIPES, Recipe
from kit.config.settings.method import MethodSettings
from kit.config.settings.optimisation import FIX_OF_BATCH
from kit.config.validation import load_recipe
from kit.errors import Problem, Problems
from kit.memory.shape import Shape
from kit.memory.workload import Workload, machines_with_copies, uncovered
from kit.strategy.strategies import DDP, FSDP2, HYBRID, OFFLOAD, SINGLE
from kit.tools.plan.hardware import Gpu, parse_gpu, parse_gpus, parse_parameters, this_machine
from kit.tools.plan.models import MODEL, find_shape, shape_of_size, shipped_id

OWN = {
    "model": "a folder, a hub id, or a shape that comes with the kit: llama-8b",
    "params": "instead of a model: a number of parameters, as 8B",
    "gpu": "24GiB, 80GB, or a name: rtx4090, a100, h100; default: this machine's",
    "gpus": "how many, or machines x GPUs: 8, 2x8; default: this machine's",
    "price": "of a GPU for an hour, in any currency",
    "write": "save the recommended recipe to this file",
}
# Words of the script and of other tools, and this command's own for them.
ANSWERS = {
    **dict.fromkeys(("num_gpus", "n_gpus", "gpu_count", "devices"), "--gpus"),
    **dict.fromkeys(("nodes", "num_nodes", "nnodes", "num_machines", "machines"), "--gpus 2x8"),
    **dict.fromkeys(("gpu_type", "gpu_name", "gpu_memory", "vram", "device"), "--gpu"),
    **dict.fromkeys(("parameters", "num_params", "num_parameters", "size"), "--params"),
    **dict.fromkeys(("cost", "price_per_hour", "hourly_price"), "--price"),
    **dict.fromkeys(("output", "save"), "--write"),
}
SWITCHES = {
    "explain": "show where each number comes from",
    "json": "print everything as JSON",
}

_HOPPER = re.compile("H[12]00")


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to plan for one model."""

    recipe: Recipe
    recipe_name: str | None  # None: no recipe file, so that commands need the flags
    shape: Shape
    only: str | None = None  # ``--config``
    typed: tuple[str, ...] = ()  # the recipe's keys that were given as flags


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A parsed command line."""

    questions: list[Question]  # several: all recipes
    gpu: Gpu | None  # None: none named, and this machine has none
    num_gpus: int | None  # None: the fewest that fit
    gpus_per_machine: int
    price: float | None
    write: Path | None
    switches: set[str]

    def workload(self, question: Question) -> Workload:
        """Return the recipe as a workload; of one GPU where no number is known."""
        num = self.num_gpus or 1
        return Workload.of(question.recipe, question.shape, num_gpus=num, gpus_per_machine=self.gpus_per_machine)


def read_ask(argv: list[str]) -> Ask:
    """Parse the words after ``kit plan``. Raises ``UserError`` with all problems."""
    problems = Problems()
    own, switches, rest = _split(argv, problems)
    gpu = None
    with problems.caught():
        gpu = parse_gpu(own["gpu"]) if "gpu" in own else None
    here = None if "gpu" in own else this_machine()
    num: int | None = None
    per_machine = 8
    if here:
        gpu, num = here
        per_machine = num
    elif gpu:
        num = per_machine = 1
    with problems.caught():
        if "gpus" in own:
            num, per_machine = parse_gpus(own["gpus"])
    price = _price(own["price"], problems) if "price" in own else None
    write = Path(own["write"]) if "write" in own else None
    if write and write.exists():
        problems.append(Problem("--write", f"{write} exists", "a new file"))
    elif write and not write.parent.is_dir():
        problems.append(Problem("--write", f"{write.parent} is no folder", "a file in a folder that exists"))
    for flag, other in (("params", "model"), ("params", "model_name_or_path"), ("model", "model_name_or_path")):
        names = {*own, *(word[2:].partition("=")[0].replace("-", "_") for word in rest if word.startswith("--"))}
        if {flag, other} <= names:
            problems.append(Problem(f"--{flag}", f"given with --{other}", fix="keep one: both name the model"))
    problems.raise_if_any()
    names_recipe = any(word.partition("=")[0] == "--recipe" for word in rest)
    names_model = bool({"model", "params"} & set(own)) or any(
        word.startswith(("--model", "--adapter")) for word in rest
    )
    if names_recipe or names_model:
        question = _question(own, rest, names_recipe, num, per_machine, problems)
        questions = [question]
        problems += _lacks(question.recipe, gpu) if question and gpu else []
    else:
        if rest:
            word = rest[0].partition("=")[0]
            fix = "add --recipe llama-8b-lora, or --model meta-llama/Llama-3.1-8B"
            found = "for which model? none is named"
            if word in recipe_names() or (RECIPES / f"{word}.yaml").is_file():
                found = "a recipe without a flag"
                fix = f"--recipe {word}"
            problems.append(Problem(word, found, fix=fix))
        questions = [] if problems else _all_recipes(problems)
    problems.raise_if_any()
    return Ask(
        questions=[question for question in questions if question],
        gpu=gpu,
        num_gpus=num,
        gpus_per_machine=per_machine,
        price=price,
        write=write,
        switches=switches,
    )


def _lacks(recipe: Recipe, gpu: Gpu) -> list[Problem]:
    """A problem for each setting with which a run on ``gpu`` would be refused."""
    problems = []
    if recipe.fp8 and not gpu.fp8:
        problems.append(Problem("--fp8", f"true, and {gpu.name} has no 8-bit products", fix="--fp8 false"))
    if recipe.optim == "adamw_bf16" and not gpu.bf16:
        found = f"adamw_bf16, and {gpu.name} has no bf16"
        problems.append(Problem("--optim", found, fix="--optim adamw_torch_fused"))
    if recipe.attn_implementation == "flash_attention_3" and gpu.is_known and not _HOPPER.search(gpu.name):
        found = f"flash_attention_3, which needs Hopper GPUs (H100, H200), and not {gpu.name}"
        problems.append(Problem("--attn_implementation", found, fix="--attn_implementation auto"))
    return problems


def _split(argv: list[str], problems: Problems) -> tuple[dict[str, str], set[str], list[str]]:
    """Take this command's own flags out of the words: their values, the switches, and the other words."""
    own: dict[str, str] = {}
    switches, rest = set(), []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, has_value, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        name = "gpus" if name == "num_processes" else name  # so that the flags of a run are those of its plan
        if word.startswith("--") and name in ANSWERS:
            if not has_value:
                value = words.pop(0) if words and not words[0].startswith("--") else ""
            typed = ANSWERS[name] if " " in ANSWERS[name] or not value else f"{ANSWERS[name]} {shlex.quote(value)}"
            problems.append(Problem(f"--{name}", "not a flag of kit plan", fix=f"{typed} instead of --{name}"))
        elif not word.startswith("--") or name not in {**OWN, **SWITCHES}:
            rest.append(word)
        elif name in SWITCHES:
            switches.add(name)
            if has_value:
                problems.append(Problem(f"--{name}", f"found {value!r}", "no value"))
        else:
            if not has_value:
                value = words.pop(0) if words and not words[0].startswith("--") else ""
            if name in own:
                problems.append(Problem(f"--{name}", f"given twice: {own[name]!r} and {value!r}", fix="keep one"))
            elif not value:
                problems.append(Problem(f"--{name}", "no value", OWN[name]))
            own.setdefault(name, value or "-")
    if "-" in own.values():
        problems.raise_if_any()
    return own, switches, rest


def _price(text: str, problems: Problems) -> float | None:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < 10_000:
        problems.append(Problem("--price", f"found {text!r}", "a number: the price of a GPU for an hour"))
        return None
    return price


def _question(
    own: dict[str, str],
    rest: list[str],
    names_recipe: bool,
    num_gpus: int | None,
    gpus_per_machine: int,
    problems: Problems,
) -> Question | None:
    """Read the recipe with its flags, and find the shape of its model."""
    words = list(rest)
    if "model" in own:
        words += ["--model_name_or_path", shipped_id(own["model"]) or own["model"]]
    elif "params" in own:
        words += ["--model_name_or_path", "MODEL"]
    given = {word[2:].partition("=")[0].replace("-", "_") for word in rest if word.startswith("--")}
    if not names_recipe and "dataset" not in given:
        words += ["--dataset", "my.jsonl"]
    request: Request = read_command_line(words)
    problems += request.problems
    if "params" in own and "dataset" in given:
        fix = "leave out --dataset; or --model MODEL, whose tokenizer counts them, instead of --params"
        problems.append(Problem("--params", "with --dataset, whose tokens nothing can count", fix=fix))
    shape = None
    field = "--params" if "params" in own else "--model" if "model" in own else "model_name_or_path"
    name = own.get("model")
    if request.recipe and (name is None or request.recipe.adapter_name_or_path):
        name = request.recipe.model_name_or_path
    with problems.caught():
        if "params" in own:
            shape = shape_of_size(parse_parameters(own["params"]), own["params"])
        elif name:
            shape = find_shape(name, field)
    config = _config(request.launch.config, num_gpus, gpus_per_machine, problems)
    if shape is None or request.recipe is None:
        return None
    recipe = request.recipe
    if shape.max_positions and recipe.max_length > shape.max_positions:
        found = f"{recipe.max_length} tokens, {shape.name} has {shape.max_positions} positions"
        problems.append(Problem("max_length", found, fix=f"--max_length {shape.max_positions}"))
    if recipe.adapter_name_or_path:
        recipe = _with_adapter(recipe)
    problems += _uncovered(recipe, shape)
    if num_gpus and recipe.global_batch_size % (num_gpus * recipe.micro_batch_size):
        gpus = f"{num_gpus} GPU{'s' if num_gpus > 1 else ''}"
        found = f"{recipe.global_batch_size}, of micro-batches of {recipe.micro_batch_size} on {gpus}"
        problems.append(Problem("global_batch_size", found, fix=FIX_OF_BATCH.replace("--num_processes", "--gpus")))
    file = request.recipe_name if names_recipe else None
    named = {MODEL} if names_recipe and "model" in own else set()
    named |= {MODEL, "adapter_name_or_path"} if recipe.adapter_name_or_path else set()
    typed = tuple(key for key in Recipe.model_fields if key in given | named)
    return Question(recipe=recipe, recipe_name=file, shape=shape, only=config, typed=typed)


def _uncovered(settings: MethodSettings, shape: Shape) -> list[Problem]:
    """A problem for each setting that changes memory in a way that no formula here describes."""
    fix = "leave it out here for the plan without it, and see the peak in the report of a run with --max_steps 2"
    unknown = [key for key in uncovered(settings, shape) if key != "adapter_name_or_path"]
    return [Problem(key, "the formulas do not know what it takes", fix=fix) for key in unknown]


def _with_adapter(recipe: Recipe) -> Recipe:
    """The recipe with rank and modules of the adapter that it goes on training."""
    config = adapter_config(recipe.adapter_name_or_path or "")
    keys = {"lora_r": "r", "use_dora": "use_dora", "lora_modules_to_save": "modules_to_save"}
    changes = {ours: config[theirs] for ours, theirs in keys.items() if config.get(theirs)}
    if isinstance(config.get("target_modules"), list):
        changes["lora_target_modules"] = config["target_modules"]
    return recipe.model_copy(update=changes)


def _config(config: str | None, num_gpus: int | None, gpus_per_machine: int, problems: Problems) -> str | None:
    """The name of the config, if those GPUs can have it."""
    if config is None:
        return None
    name, known = config.removesuffix(".yaml"), [strategy.config for strategy in (SINGLE, DDP, FSDP2, OFFLOAD, HYBRID)]
    if name not in known:
        problems.append(Problem("--config", f"found {config!r}", f"one of {', '.join(known)}"))
    elif num_gpus and (name == "single") != (num_gpus == 1):
        fix = "--config ddp, or --config fsdp" if name == "single" else "--config single"
        problems.append(Problem("--config", f"{config} with {num_gpus} GPU{'s' if num_gpus > 1 else ''}", fix=fix))
    elif name == HYBRID.config and num_gpus and machines_with_copies(num_gpus, gpus_per_machine) == 1:
        found = f"{config} with {num_gpus} GPUs, {gpus_per_machine} in a machine"
        expected = "several machines, each with a copy that its GPUs share"
        problems.append(Problem("--config", found, expected, "--gpus 2x8, or --config fsdp"))
    return name


def _all_recipes(problems: Problems) -> list[Question | None]:
    questions: list[Question | None] = []
    for name in recipe_names():
        with problems.caught():
            recipe = load_recipe(name)
            shape = find_shape(recipe.model_name_or_path)
            questions.append(Question(recipe=recipe, recipe_name=name, shape=shape))
    return sorted(questions, key=lambda question: question.shape.num_parameters if question else 0)
