"""The reference of an objective: the model as it was at the start of the run."""

from kit.run.run import Run
from kit.system import phases
from kit.train.policy import Policy
from kit.train.precompute import add_references


def bind_reference(policy: Policy, run: Run) -> None:
    """Compute the reference's log-probabilities, unless it is the model without its adapters. Called by all ranks.

    Raises as ``add_references``.
    """
    checked, recipe = run.checked, run.checked.recipe
    if recipe.precomputes_reference:
        run.enter(phases.REFERENCE)
        add_references(policy, recipe, checked.data, checked.total_steps, run.progress)
