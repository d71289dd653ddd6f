"""The reference of an objective: the model as it was at the start of the run."""

from typing import TYPE_CHECKING

from kit.data.open import pad_id
from kit.system import phases
from kit.train.policy import Policy
from kit.train.precompute import add_references

if TYPE_CHECKING:
    from kit.run.run import Run


def bind_reference(policy: Policy, run: "Run") -> None:
    """Compute the reference's log-probabilities, unless it is the model without its adapters. Called by all ranks.

    Raises as ``add_references``.
    """
    checked, recipe = run.checked, run.checked.recipe
    if recipe.precomputes_reference:
        run.enter(phases.REFERENCE)
        of_data = checked.data, checked.total_steps, recipe.eval_batch_size, pad_id(policy.tokenizer), run.progress
        add_references(policy, recipe, *of_data, seed=recipe.seed, compiled=bool(recipe.torch_compile))
