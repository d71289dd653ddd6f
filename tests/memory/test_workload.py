"""A workload is what a recipe would run."""

from kit.config.validation import load_recipe
from kit.memory.workload import Workload, uncovered
from kit.strategy.strategies import FSDP2
from kit.tools.plan.models import find_shape


def test_a_workload_follows_its_recipe():
    chosen = {"per_device_train_batch_size": 2, "gradient_checkpointing": True}
    recipe = load_recipe("llama-8b-full").model_copy(update=chosen)
    own = Workload.of(recipe, find_shape("llama-8b"), FSDP2, num_gpus=4)
    assert (own.method, own.rows, own.length, own.gradient_checkpointing) == ("full", 2, 4096, True)
    assert own.num_gpus * own.rows * own.micro_batches == recipe.global_batch_size
    assert own.config == "fsdp" and own.sharded and own.tokens == 8192
    assert own.trainable_parameters == own.shape.num_parameters and own.adapter_parameters == 0


def test_attention_is_eager_where_the_family_takes_no_other_or_the_recipe_says_so():
    recipe, llama, gemma = load_recipe("llama-8b-lora"), find_shape("llama-8b"), find_shape("gemma-2-2b")
    assert not Workload.of(recipe, llama).eager and Workload.of(recipe, gemma).eager
    assert Workload.of(recipe.model_copy(update={"attn_implementation": "eager"}), llama).eager
    assert not Workload.of(recipe.model_copy(update={"attn_implementation": "flash_attention_2"}), gemma).eager


def with_objective(objective, method="lora", **fields):
    return Workload(shape=find_shape("llama-8b"), method=method, objective=objective, rows=3, length=1024, **fields)


def test_a_pair_is_two_rows_or_a_pack_of_twice_the_length():
    answers, pairs, packed = with_objective("sft"), with_objective("orpo"), with_objective("orpo", packing=True)
    assert pairs.tokens == packed.tokens == 2 * answers.tokens == 2 * 3 * 1024
    assert (answers.width, pairs.width, packed.width) == (1024, 1024, 2048)
    assert with_objective("kto").tokens == answers.tokens
    recipe = load_recipe("llama-8b-lora").model_copy(update={"objective": "dpo", "precompute_reference": True})
    own = Workload.of(recipe, find_shape("llama-8b"))
    assert own.sequences == 2 and own.precomputes_reference


def test_passes_without_gradients_are_in_each_step_or_before_the_first():
    cases = [
        ("sft", "lora", False, 0, 0),
        ("orpo", "full", False, 0, 0),
        ("dpo", "lora", False, 1, 0),
        ("dpo", "qlora", True, 0, 1),
        ("dpo", "full", False, 0, 1),  # its weights change
        ("kto", "lora", False, 3, 0),  # the reference's, and of mismatched samples the model's and the reference's
        ("kto", "lora", True, 1, 2),
        ("kto", "full", False, 1, 2),
    ]
    for case in cases:
        objective, method, precomputes, passes, first_passes = case
        own = with_objective(objective, method, precompute_reference=precomputes)
        assert (own.passes, own.first_passes) == (passes, first_passes), case


def test_settings_that_no_formula_describes_are_named():
    recipe = load_recipe("llama-8b-lora")
    shape = find_shape("llama-8b")
    assert uncovered(recipe, shape) == []
    changed = recipe.model_copy(update={"use_dora": True, "new_tokens": ["<a>"]})
    assert uncovered(changed, shape) == ["use_dora", "new_tokens"]
    assert uncovered(recipe.model_copy(update={"adapter_type": "oft"}), shape) == ["adapter_type"]


def test_targets_are_planned_if_they_are_the_same_in_every_layer():
    """And are named as what no formula describes otherwise."""
    cases = [
        (["q_proj", "mlp.up_proj"], {"q_proj", "up_proj"}),
        ([r".*\.(mlp|self_attn)\.(up|q)_proj"], {"q_proj", "up_proj"}),
        ([r"model\.layers\.\d+\.mlp\..*"], {"gate_proj", "up_proj", "down_proj"}),
        ([r".*\.layers\.[02]\.mlp\.up_proj"], None),
        (["model.layers.3.mlp.up_proj"], None),
        (["q_proj", "lm_head"], None),
        (["no_such"], None),
    ]
    for case in cases:
        targets, names = case
        recipe = load_recipe("llama-8b-lora").model_copy(update={"lora_target_modules": targets})
        shape = find_shape("llama-8b")
        if names is None:
            assert uncovered(recipe, shape) == ["lora_target_modules"], case
        else:
            assert uncovered(recipe, shape) == [], case
            assert set(Workload.of(recipe, shape).lora_targets) == names, case
