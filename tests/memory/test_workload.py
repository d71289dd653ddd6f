"""A workload is what a recipe would run."""

from kit.config.command_line import read_recipe
from kit.memory.workload import Workload, uncovered
from kit.tools.plan.models import find_shape


def with_objective(objective, method="lora", **fields):
    return Workload(shape=find_shape("llama-8b"), method=method, objective=objective, rows=3, length=1024, **fields)


def test_a_pair_is_two_rows_or_a_pack_of_twice_the_length():
    answers, pairs, packed = with_objective("sft"), with_objective("orpo"), with_objective("orpo", packing=True)
    assert pairs.tokens == packed.tokens == 2 * answers.tokens == 2 * 3 * 1024
    assert (answers.width, pairs.width, packed.width) == (1024, 1024, 2048)
    assert with_objective("kto").tokens == answers.tokens
    recipe = read_recipe(["--recipe", "llama-8b-lora"]).model_copy(
        update={"objective": "dpo", "precompute_reference": True}
    )
    own = Workload.of(recipe, find_shape("llama-8b"))
    assert own.sequences == 2 and own.precomputes_reference


def test_passes_without_gradients_are_in_each_step_or_before_the_first():
    cases = [
        ("sft", "lora", False, 0, 0),
        ("orpo", "full", False, 0, 0),
        ("dpo", "lora", False, 1, 0),
        ("dpo", "full", False, 0, 1),  # its weights change
        ("kto", "lora", False, 3, 0),  # the reference's, and of mismatched samples the model's and the reference's
        ("kto", "lora", True, 1, 2),
    ]
    for case in cases:
        objective, method, precomputes, passes, first_passes = case
        own = with_objective(objective, method, precompute_reference=precomputes)
        assert (own.passes, own.first_passes) == (passes, first_passes), case


def test_targets_are_planned_if_they_are_the_same_in_every_layer():
    """And are named as what no formula describes otherwise."""
    cases = [
        ([r".*\.(mlp|self_attn)\.(up|q)_proj"], {"q_proj", "up_proj"}),
        ([r"model\.layers\.\d+\.mlp\..*"], {"gate_proj", "up_proj", "down_proj"}),
        ([r".*\.layers\.[02]\.mlp\.up_proj"], None),
        (["q_proj", "lm_head"], None),
        (["no_such"], None),
    ]
    for case in cases:
        targets, names = case
        recipe = read_recipe(["--recipe", "llama-8b-lora"]).model_copy(update={"lora_target_modules": targets})
        shape = find_shape("llama-8b")
        if names is None:
            assert uncovered(recipe, shape) == ["lora_target_modules"], case
        else:
            assert uncovered(recipe, shape) == [], case
            assert set(Workload.of(recipe, shape).lora_targets) == names, case
