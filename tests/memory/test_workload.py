"""A workload is what a recipe would run."""

from dataclasses import replace

from kit.config.validation import load_recipe
from kit.memory.workload import Workload, uncovered
from kit.strategy.strategies import DDP, FSDP2, HYBRID
from kit.tools.plan.models import find_shape


def test_a_workload_follows_its_recipe():
    chosen = {"per_device_train_batch_size": 2, "gradient_checkpointing": True}
    recipe = load_recipe("llama-8b-full").model_copy(update=chosen)
    own = Workload.of(recipe, find_shape("llama-8b"), FSDP2, num_gpus=4)
    assert (own.method, own.rows, own.length, own.gradient_checkpointing) == ("full", 2, 4096, True)
    assert own.num_gpus * own.rows * own.micro_batches == recipe.global_batch_size
    assert own.config == "fsdp" and own.sharded and own.tokens == 8192
    assert own.trainable_parameters == own.shape.num_parameters and own.adapter_parameters == 0


def test_copies_of_hybrid_sharding_divide_the_gpus():
    recipe, shape = load_recipe("llama-8b-full"), find_shape("llama-8b")
    own = Workload.of(recipe, shape, HYBRID, num_gpus=16, num_replicas=2)
    assert (own.config, own.num_shards, own.num_machines) == ("fsdp_hybrid", 8, 2)
    assert replace(own, strategy=DDP, num_replicas=1).num_shards == 1
    assert replace(own, strategy=FSDP2, num_replicas=1).num_shards == 16


def test_adapters_train_and_the_rest_does_not():
    own = Workload.of(load_recipe("llama-8b-lora"), find_shape("llama-8b"))
    assert own.trainable_parameters == own.adapter_parameters == 41_943_040
    assert own.config == "single" and not own.sharded


def test_adapters_of_a_model_in_bf16_train_in_float32():
    full = Workload(shape=find_shape("llama-8b"), method="full", length=128, optim="adamw_bf16", pure_bf16=True)
    adapters = full.with_method("lora")
    assert not adapters.pure_bf16 and adapters.optim == "adamw_torch_fused"


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


def test_the_reference_of_an_adapter_that_is_trained_on_is_computed_before_the_first_step():
    recipe = load_recipe("llama-8b-lora").model_copy(
        update={"objective": "dpo", "adapter_name_or_path": "some/adapter"}
    )
    assert recipe.precomputes_reference and Workload.of(recipe, find_shape("llama-8b")).first_passes == 1


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
