"""Read the command line of ``kit plan``: what is to be planned, for which GPUs.

The flags of ``recipes/finetune.py`` mean what they mean there. Those of ``OWN`` are of this command.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kit.config.command_line import read_command_line
from kit.config.recipe import Recipe
from kit.memory.shape import Shape
from kit.memory.workload import Workload, uncovered
from kit.system.console import Parser
from kit.system.errors import Problem, UserError, counted, raise_if
from kit.tools.plan.hardware import Gpu, parse_gpu, parse_gpus, this_machine
from kit.tools.plan.models import MODEL, find_shape, shipped_id
from kit.tools.plan.search import sequence_parallel_sizes, strategies, supports_sequence_parallelism

OWN = {
    "model": "a folder, a hub id, or a shape that comes with the kit: llama-8b",
    "gpu": "24GiB, 80GB, or a name: rtx4090, 8xh100, a100-40gb; default: this machine's",
    "gpus": "number of GPUs, or machines x GPUs: 8, 2x8; default: this machine's",
    "price": "per GPU and hour, in any currency",
}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A parsed command line: what to plan, and for which GPUs."""

    recipe: Recipe
    recipe_name: str | None  # None: no recipe file, so that commands need the flags
    shape: Shape
    teacher: Shape | None  # the largest that runs here
    only: str | None  # ``--config``
    typed: frozenset[str]  # the keys of the recipe that were given as flags
    gpu: Gpu
    num_gpus: int
    sequence_parallel_size: int
    gpus_per_machine: int
    price: float | None

    @property
    def workload(self) -> Workload:
        """The recipe as a workload."""
        return Workload.of(
            self.recipe,
            self.shape,
            num_gpus=self.num_gpus,
            gpus_per_machine=self.gpus_per_machine,
            teacher=self.teacher,
            sequence_parallel_size=self.sequence_parallel_size,
        )


def read_plan_request(argv: list[str]) -> PlanRequest:
    """Parse the words after ``kit plan``. Raises ``UserError``."""
    parser = Parser(prog="kit plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--model")
    parser.add_argument("--gpu", type=parse_gpu)
    parser.add_argument("--gpus", "--num_processes", type=parse_gpus)
    parser.add_argument("--price", type=float)
    own, rest = parser.parse_known_args(argv)
    names = {word[2:].partition("=")[0].replace("-", "_") for word in rest if word.startswith("--")}
    if own.model is None and not names & {"recipe", MODEL}:
        fix = "add --recipe llama-8b-lora, or --model meta-llama/Llama-3.1-8B; `kit recipes` lists the recipes"
        raise UserError("--recipe", "no model named", fix=fix)
    gpu, *counts = own.gpu or this_machine() or (None, 1)
    if gpu is None:
        raise UserError("--gpu", "not given, and this machine has no GPU", "for example --gpu rtx4090")
    num, per_machine = own.gpus or (counts[0], counts[-1])
    if own.gpu and 1 < counts[0] != num:
        raise UserError("--gpus", f"{num}, and --gpu has {counts[0]}", fix="leave it out")
    model, words = own.model, rest
    if model is not None:
        words = [*words, "--model_name_or_path", shipped_id(model) or model]
    if not names & {"recipe", "dataset"}:
        words = [*words, "--dataset", "my.jsonl"]
    parsed = read_command_line(words)
    raise_if(parsed.problems)
    recipe = parsed.recipe
    assert recipe is not None
    shape = find_shape(model or recipe.model_name_or_path, "--model" if model else MODEL)
    # Of several, as entries of the dataset name them, one is loaded after the other.
    of_run = None if recipe.teacher_server else recipe.teacher
    names_here = {each.teacher or of_run for each in recipe.dataset_entries if not each.teacher_server}
    teachers = [find_shape(name, "teacher") for name in names_here if name]
    config = parsed.launch.config
    request = PlanRequest(
        recipe=recipe,
        recipe_name=parsed.launch.recipe,
        shape=shape,
        teacher=max(teachers, key=lambda each: each.num_parameters, default=None),
        only=config.removesuffix(".yaml") if config else None,
        typed=frozenset([*names & set(Recipe.model_fields), *([MODEL] if model is not None else [])]),
        gpu=gpu,
        num_gpus=num,
        sequence_parallel_size=parsed.launch.sequence_parallel_size or 1,
        gpus_per_machine=per_machine,
        price=own.price,
    )
    raise_if(_refused(request))
    return request


def _refused(request: PlanRequest) -> Iterator[Problem]:
    """A problem for each setting that no formula covers, or with which a run on these GPUs would be refused."""
    recipe, shape, gpu, num = request.recipe, request.shape, request.gpu, request.num_gpus
    fix = "plan without it; the report of a run with --max_steps 2 shows the measured peak"
    yield from (Problem(key, "not covered by the formulas of the plan", fix=fix) for key in uncovered(recipe, shape))
    if shape.max_positions and recipe.max_length > shape.max_positions:
        found = f"{recipe.max_length} tokens, more than max_position_embeddings {shape.max_positions} of {shape.name}"
        yield Problem(
            "max_length",
            found,
            fix=f"--max_length {shape.max_positions}; or docs/models.md#context-extension-rope-scaling",
        )
    sharing = request.sequence_parallel_size
    if sharing not in (sizes := sequence_parallel_sizes(request.workload)):
        on_machines = f", {request.gpus_per_machine} a machine," if num > request.gpus_per_machine else ""
        found = f"{sharing}, of {counted(num, 'GPU')}{on_machines} and {shape.num_heads} attention heads"
        if not supports_sequence_parallelism(request.workload):
            found = f"{sharing}, but this model does not support sequence parallelism"
        yield Problem("sequence_parallel_size", found, f"one of {', '.join(map(str, sizes))}")
    elif recipe.global_batch_size % (unit := num // sharing * recipe.micro_batch_size):
        found = f"{recipe.global_batch_size}, of micro-batches of {recipe.micro_batch_size} on {num} GPUs"
        few = (
            "or --sequence_parallel_size N: sequence parallelism over N GPUs" if recipe.global_batch_size < num else ""
        )
        yield Problem("global_batch_size", found, f"a multiple of {unit}", few)
    if recipe.fp8 and not gpu.fp8:
        yield Problem("--fp8", f"true, but {gpu.name} has no FP8 matmuls", fix="--fp8 false")
    if recipe.optim == "adamw_bf16" and not gpu.bf16:
        found = f"adamw_bf16, but {gpu.name} has no bf16"
        yield Problem("--optim", found, fix="--optim adamw_torch_fused")
    own = [way.config for way in strategies(request.workload)]
    if request.only and request.only not in own:
        found = f"{request.only}, with {recipe.method} and {recipe.optim} on {counted(num, 'GPU')}"
        yield Problem("--config", found, f"one of {', '.join(own)}")
