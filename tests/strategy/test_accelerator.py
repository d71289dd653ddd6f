"""The strategy that was asked for is the one that runs, or the run stops; a dry run says the same of it."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import make_model, with_gpus
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from benchmarks.tiny_families import tiny_config
from kit.config.recipe import Recipe
from kit.config.settings.method import MethodSettings
from kit.data.feed.ranks import Ranks
from kit.errors import TrainingError
from kit.model.load import build_meta_model, build_model, open_config
from kit.model.plan import LoadPlan
from kit.model.tokenizer import open_tokenizer
from kit.strategy.accelerator import (
    Prepared,
    check_adapter_units,
    check_strategy,
    data_ranks,
    layer_classes,
    planned_strategy,
    prepare,
    start,
)
from kit.strategy.strategies import DDP, FSDP1, FSDP2, SINGLE
from kit.strategy.topology import Topology
from kit.train.optim import build_optimizer


def topology(strategy=SINGLE, **changes):
    values = {"config_name": strategy.config, "num_processes": 1, "mixed_precision": "no", "device_type": "cpu"}
    return Topology(strategy=strategy, **(values | changes))


@pytest.fixture
def recipe(model_folder, tmp_path):
    return Recipe(model_name_or_path=str(model_folder), dataset="d", method="full", output_dir=str(tmp_path / "out"))


@pytest.fixture
def llama(recipe):
    return build_meta_model(recipe, open_config(recipe))


def test_the_models_own_decoder_layer_is_sharded_unless_the_config_names_another(llama, model):
    assert layer_classes(topology(FSDP2), llama) == ("LlamaDecoderLayer",)
    assert layer_classes(topology(FSDP2, layer_classes=("LlamaMLP",)), llama) == ("LlamaMLP",)
    assert layer_classes(topology(FSDP2), model.head) == ()


def test_a_layer_that_the_model_does_not_have_is_refused_with_those_it_has(llama):
    assert check_strategy(topology(FSDP2), llama) == []
    (problem,) = check_strategy(topology(FSDP2, layer_classes=("MistralDecoderLayer",)), llama)
    assert problem.where == "fsdp_transformer_layer_cls_to_wrap"
    assert "no MistralDecoderLayer in this model" in problem.found and "LlamaDecoderLayer" in problem.expected
    assert "leave the line out" in problem.fix


def test_a_model_that_does_not_say_what_to_shard_is_refused_where_it_is_sharded(model):
    (problem,) = check_strategy(topology(FSDP1), model.head)
    assert "Linear does not say which layers to shard" in problem.found and problem.fix == "name it in the config"
    assert check_strategy(topology(DDP), model.head) == []


def test_layers_that_share_weights_are_refused_before_they_are_sharded_apart(llama):
    llama.model.layers[1].mlp = llama.model.layers[0].mlp
    (problem,) = check_strategy(topology(FSDP2), llama)
    assert "layers of LlamaForCausalLM share weights" in problem.found and problem.fix == "--config ddp"
    assert check_strategy(topology(DDP), llama) == []


def test_bf16_on_a_gpu_without_it_is_refused(llama, monkeypatch):
    with_gpus(monkeypatch, ("NVIDIA A10", 8))
    assert check_strategy(topology(mixed_precision="bf16", device_type="cuda"), llama) == []
    with_gpus(monkeypatch, ("Tesla T4", 7))
    (problem,) = check_strategy(topology(mixed_precision="bf16", device_type="cuda"), llama)
    assert str(problem).startswith("mixed_precision: bf16, which Tesla T4 does not have; expected no")
    assert check_strategy(topology(mixed_precision="bf16"), llama) == []


def test_autocast_keeps_no_second_copy_of_the_weights(accelerate_starts_afresh, recipe):
    accelerator, _ = start(recipe, topology(mixed_precision="bf16"))
    layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(4))
    copies = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and args[0].shape == (64, 64):
                copies.append(weakref.ref(result))
            return result

    with accelerator.autocast(), Copies():
        for layer in layers:
            checkpoint(layer, torch.ones(2, 64), use_reentrant=False).sum()
        assert len(copies) == 4 and not any(copy() is not None for copy in copies)


def test_a_cpu_adds_in_one_order_without_being_asked(recipe):
    """Without it two runs of gpt-oss differed: threads add gradients of what is taken by index in any order."""
    torch.use_deterministic_algorithms(False)
    start(recipe, topology())
    assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory  # for no use, and slower


def test_gradients_lie_in_buckets_of_the_size_that_was_asked_for(accelerate_starts_afresh, recipe):
    accelerator, _ = start(recipe.model_copy(update={"ddp_bucket_cap_mb": 7}), topology())
    handler = accelerator.ddp_handler
    assert (handler.bucket_cap_mb, handler.gradient_as_bucket_view) == (7, True)
    assert not handler.static_graph and not handler.find_unused_parameters and handler.comm_hook.value == "no"


def test_a_dry_run_says_what_a_run_says_of_itself(accelerate_starts_afresh, recipe, llama, model):
    wanted = topology()
    accelerator, plan = start(recipe, wanted)
    assert (plan.compute_dtype, plan.device) == ("float32", "cpu")
    prepared = prepare(accelerator, wanted, model, build_optimizer(model, recipe, recipe.peak_learning_rate))
    expected = planned_strategy(wanted, model)
    assert prepared.strategy.num_threads == torch.get_num_threads()
    assert replace(prepared.strategy, num_threads=0) == expected
    assert expected.trainable_parameters == 30 and expected.sharded_layers is None
    sharded = planned_strategy(topology(FSDP2, num_processes=2), llama).sharded_layers
    assert (sharded.classes, sharded.count) == (["LlamaDecoderLayer"], 3)


def test_another_strategy_than_the_one_asked_for_stops_the_run(accelerate_starts_afresh, recipe):
    with pytest.raises(TrainingError, match="asked for Single on 2 processes, got Single on 1"):
        start(recipe, topology(num_processes=2))


def test_another_number_of_copies_than_asked_for_stops_the_run(sharded, monkeypatch):
    monkeypatch.setattr("kit.strategy.accelerator.num_replicas", lambda model: 2)
    with pytest.raises(TrainingError, match="asked for 1 copies of the model, got 2"):
        sharded()


def test_the_share_of_a_process_is_summed_over_all(accelerate_starts_afresh, recipe):
    accelerator, _ = start(recipe, topology())
    ranks = data_ranks(accelerator)
    assert (ranks.index, ranks.count) == (0, 1)
    assert ranks.sum(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]


SHARED = "to which the head is tied"


@pytest.mark.parametrize(
    ("tied", "changes", "found"),
    [
        (True, {"lora_modules_to_save": ["embed_tokens"]}, SHARED),
        (True, {"lora_modules_to_save": ["embed_tokens", "lm_head"]}, SHARED),
        (True, {"lora_modules_to_save": ["norm"]}, ""),
        (True, {}, ""),
        (False, {"lora_modules_to_save": ["embed_tokens", "lm_head"]}, ""),
        (True, {"trainable_tokens": ["<|im_end|>"]}, ""),  # of an adapter from files: it trains as on one process
    ],
)
@pytest.mark.parametrize("from_files", [False, True])
def test_a_weight_in_two_units_of_fsdp1_is_refused_before_weights_are_read(tmp_path, tied, changes, found, from_files):
    folder = make_model(tmp_path / "model", tie_word_embeddings=tied)
    settings = MethodSettings(model_name_or_path=str(folder), **changes)
    if from_files:
        adapter = build_model(settings, open_config(settings), LoadPlan(compute_dtype="float32", device="cpu"))
        adapter.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        open_tokenizer(settings).save_pretrained(tmp_path / "adapter")
        settings = MethodSettings(model_name_or_path=str(folder), adapter_name_or_path=str(tmp_path / "adapter"))
    meta_model = build_meta_model(settings, open_config(settings))
    problems = check_adapter_units(topology(FSDP1), settings, meta_model)
    assert bool(problems) == bool(found)
    for problem in problems:
        assert found in problem.found and problem.fix == "--config fsdp"
        assert problem.where == ("adapter_name_or_path" if from_files else "lora_modules_to_save")
    assert check_adapter_units(topology(FSDP2), settings, meta_model) == []
    full = settings.model_copy(update={"method": "full"})
    assert check_adapter_units(topology(FSDP1), full, meta_model) == []


@pytest.mark.parametrize(("tied", "found"), [(True, ["config"]), (False, [])])
def test_towers_beside_a_tied_head_are_refused_under_fsdp1(tied, found):
    settings = MethodSettings(model_name_or_path="m", method="full")
    config = tiny_config("mistral3")
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = tied
    meta_model = build_meta_model(settings, config)
    assert [problem.where for problem in check_adapter_units(topology(FSDP1), settings, meta_model)] == found
    assert check_adapter_units(topology(FSDP2), settings, meta_model) == []


@pytest.mark.parametrize(
    ("mixed_precision", "matmul", "expected"),
    [("no", "highest", True), ("no", "high", False), ("bf16", "highest", False)],
    ids=["float32", "tf32", "bf16"],
)
def test_only_a_run_without_bf16_and_tf32_computes_in_float32(mixed_precision, matmul, expected, monkeypatch):
    monkeypatch.setattr("torch.get_float32_matmul_precision", lambda: matmul)
    accelerator = SimpleNamespace(mixed_precision=mixed_precision)
    assert Prepared(accelerator, Ranks(), None, None, None).computes_in_float32 is expected


@pytest.mark.parametrize("load_on_rank0", [False, True])
def test_weights_in_bf16_stay_so_when_they_are_sharded(sharded, model, load_on_rank0):
    """Accelerate would make float32 of those that are trained."""
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    model.to(torch.bfloat16)
    prepared = sharded(mixed_precision="bf16", load_on_rank0=load_on_rank0)
    after = dict(prepared.model.named_parameters())
    assert {name: p.requires_grad for name, p in after.items()} == before
    assert {p.dtype for p in after.values()} == {torch.bfloat16}
    assert {p.grad_dtype for p in after.values() if p.requires_grad} == {None}  # any
    prepared.model(torch.ones(3, 4)).sum().backward()
    gradients = {name: p.grad for name, p in after.items() if p.grad is not None}
    assert gradients.keys() == {name for name, trains in before.items() if trains}
