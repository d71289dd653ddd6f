"""The reference model: the initial policy of the run."""

from kit.run.run import Run
from kit.system import phases
from kit.train.policy import Policy
from kit.train.precompute import add_references


def bind_reference(policy: Policy, run: Run) -> None:
    """Compute the reference model's log-probabilities, unless it is the base of an adapter. Called by all ranks.

    Raises as ``add_references``.
    """
    checked, recipe = run.checked, run.checked.recipe
    if recipe.precomputes_reference:
        run.enter(phases.REFERENCE)
        add_references(policy, recipe, checked.data, checked.total_steps, run.progress)
