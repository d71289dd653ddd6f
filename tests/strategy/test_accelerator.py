"""The run has the requested strategy, or stops; a dry run reports the same strategy."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from benchmarks.tiny_families import tiny_config
from kit.config.recipe import Recipe
from kit.config.settings.method import MethodSettings
from kit.model.build import build_meta_model, open_config
from kit.strategy.accelerator import (
    check_adapter_units,
    check_strategy,
    layer_classes,
    planned_strategy,
    prepare,
    start,
)
from kit.strategy.strategies import DDP, FSDP1, FSDP2, SINGLE
from kit.strategy.topology import Topology
from kit.system.errors import TrainingError
from kit.train.optim.optim import build_optimizer


def topology(strategy=SINGLE, **changes):
    values = {"config_name": strategy.config, "num_processes": 1, "mixed_precision": "no", "device_type": "cpu"}
    return Topology(strategy=strategy, **(values | changes))


@pytest.fixture
def recipe(model_folder, tmp_path):
    return Recipe(model_name_or_path=str(model_folder), dataset="d", method="full", output_dir=str(tmp_path / "out"))


@pytest.fixture
def llama(recipe):
    return build_meta_model(recipe, open_config(recipe))


def test_the_models_own_decoder_layer_is_sharded_unless_the_config_names_another(llama):
    assert (
        layer_classes(topology(FSDP2), llama) == ("LlamaDecoderLayer",) and check_strategy(topology(FSDP2), llama) == []
    )
    assert layer_classes(topology(FSDP2, layer_classes=("LlamaMLP",)), llama) == ("LlamaMLP",)
    (problem,) = check_strategy(topology(FSDP2, layer_classes=("MistralDecoderLayer",)), llama)
    assert problem.where == "fsdp_transformer_layer_cls_to_wrap"
    assert "no MistralDecoderLayer in this model" in problem.found and "LlamaDecoderLayer" in problem.expected


def test_layers_that_share_weights_are_refused_under_fsdp(llama):
    llama.model.layers[1].mlp = llama.model.layers[0].mlp
    (problem,) = check_strategy(topology(FSDP2), llama)
    assert "layers of LlamaForCausalLM share weights" in problem.found and problem.fix == "--config ddp"
    assert check_strategy(topology(DDP), llama) == []


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


def test_a_dry_run_reports_the_strategy_of_the_run(accelerate_starts_afresh, recipe, llama, model):
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


@pytest.mark.parametrize(("tied", "found"), [(True, ["config"]), (False, [])])
def test_towers_with_a_tied_head_are_refused_under_fsdp1(tied, found):
    settings = MethodSettings(model_name_or_path="m", method="full")
    config = tiny_config("mistral3")
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = tied
    meta_model = build_meta_model(settings, config)
    assert [problem.where for problem in check_adapter_units(topology(FSDP1), settings, meta_model)] == found
    assert check_adapter_units(topology(FSDP2), settings, meta_model) == []


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
