"""What ``--dry_run`` prints: what a run would do, by its checks and by formulas."""

from kit.data.feed.data_ranks import Ranks
from kit.export.final import describe_serving
from kit.memory.formulas import predict
from kit.memory.workload import Workload
from kit.model.adapters.adapter import attach_adapter
from kit.model.adapters.freeze import trained_encoders
from kit.model.adapters.reach import freeze_unreached_parts
from kit.model.four_bit import quantised_on_meta
from kit.model.pretrained.locate import has_weights
from kit.model.summary import describe_parts
from kit.run.checked import Checked
from kit.strategy.accelerator import planned_strategy
from kit.tools.plan.shown_plan import parts


def describe_run(checked: Checked) -> list[str]:
    """Describe for ``--dry_run`` what the run would do: strategy, memory, data, and number of steps.

    Raises:
        UserError: the run in the output folder cannot continue.
    """
    recipe, data, topology = checked.recipe, checked.data, checked.topology
    assert topology is not None
    model = quantised_on_meta(checked.meta_model) if recipe.method == "qlora" else checked.meta_model
    adapted = attach_adapter(model, recipe)
    freeze_unreached_parts(model, trained_encoders(model, recipe))
    strategy = planned_strategy(topology, adapted)
    feed = data.open_feed(recipe, Ranks(0, topology.num_data_ranks), 0, {})
    steps = f"{checked.total_steps} steps. Dry run: nothing written but the tokenised data in the cache."
    lines = [strategy.describe(recipe, recipe), *describe_parts(adapted, recipe, recipe.router_aux_loss_coef)]
    if not has_weights(recipe):
        lines.append(
            f"weights: none of {recipe.model_name_or_path} are on this machine; only a run needs and checks them"
        )
    plan = describe_plan(checked.workload)
    outlook = checked.folder.describe_resume(checked.total_steps) if checked.folder else []
    serving = describe_serving(adapted, checked.folder.final) if checked.folder else []
    return [*lines, *plan, *serving, *checked.notes, *feed.notes(), *outlook, steps]


def describe_plan(workload: Workload | None) -> list[str]:
    """Describe by formulas what the run would take: memory by component, and disk."""
    if workload is None:
        return ["no plan: the formulas do not cover this run (docs/memory-and-speed.md#what-it-does-not-cover)"]
    time = "time: run `kit plan` with the same flags, here or with --gpu h100"
    of_images = f", {workload.image_tokens:,} image or audio tokens per row" if workload.shape.tower else ""
    return [f"planned by formulas, not measured{of_images}:", *parts(predict(workload)), time]
