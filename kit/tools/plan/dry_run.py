"""What ``--dry_run`` prints: what a run would do, by its checks and by formulas."""

from kit.config.recipe import Recipe
from kit.console import say
from kit.data.feed.ranks import Ranks
from kit.data.feed.stream import Stream
from kit.data.open import Data
from kit.export.final import describe_serving
from kit.memory.fit import planned_workload
from kit.memory.formulas import predict
from kit.memory.workload import Workload
from kit.model.adapter import attach_adapter
from kit.model.four_bit import quantised_on_meta
from kit.model.locate import has_weights
from kit.model.parts import describe_parts
from kit.model.reach import freeze_unreached_parts
from kit.preflight import Preflight
from kit.strategy.accelerator import planned_strategy
from kit.strategy.topology import Topology
from kit.tools.plan.hardware import this_machine
from kit.tools.plan.lengths import measure_lengths
from kit.tools.plan.search import try_out
from kit.tools.plan.table import parts, time_lines


def show_run(checked: Preflight, topology: Topology) -> None:
    """Print what the run would do. Raises as ``describe_run`` does."""
    say(*describe_run(checked, topology))


def describe_run(checked: Preflight, topology: Topology) -> list[str]:
    """Describe for ``--dry_run`` what the run would do: strategy, memory and time, data, and number of steps.

    Raises:
        UserError: the run in the output folder cannot continue.
    """
    recipe, data = checked.recipe, checked.data
    model = quantised_on_meta(checked.meta_model) if recipe.method == "qlora" else checked.meta_model
    adapted = attach_adapter(model, recipe)
    freeze_unreached_parts(model)
    strategy = planned_strategy(topology, adapted)
    feed = data.open_feed(recipe, Ranks(0, topology.num_processes), 0, {})
    steps = f"{checked.total_steps} steps. Dry run: nothing written but the tokenised data in the cache."
    lines = [strategy.describe(recipe, recipe), *describe_parts(adapted, recipe, recipe.router_aux_loss_coef)]
    if not has_weights(recipe):
        lines.append(
            f"weights: none of {recipe.model_name_or_path} are on this machine; only a run needs and checks them"
        )
    workload = planned_workload(recipe, topology, checked.config)
    plan = describe_plan(workload, recipe, data, topology.device_type == "cuda")
    outlook = checked.folder.describe_resume(checked.total_steps) if checked.folder else []
    serving = describe_serving(adapted, checked.folder.final) if checked.folder else []
    return [*lines, *plan, *serving, *checked.notes, *feed.notes(), *outlook, steps]


def describe_plan(workload: Workload | None, recipe: Recipe, data: Data | Stream, on_gpus: bool) -> list[str]:
    """Describe by formulas what the run would take: memory by component, disk, and on known GPUs the time.

    Args:
        recipe: of the run, its settings chosen.
        on_gpus: whether the run uses the GPUs of this machine.
    """
    if workload is None:
        return ["no plan: the formulas do not describe this run (docs/planning.md says which they do)"]
    lines = ["planned by formulas, not measured:", *parts(predict(workload))]
    found = this_machine() if on_gpus else None
    lengths = measure_lengths(data, recipe, workload.num_gpus) if isinstance(data, Data) else None
    gpu = found[0] if found else None
    if gpu and gpu.is_known:
        return [*lines, *time_lines(try_out(workload, gpu), data.total_steps(recipe), lengths=lengths)]
    return [
        *lines,
        f"time: unknown {'GPU' if found else 'here'}; `kit plan` with the same flags and --gpu h100 says it",
    ]
