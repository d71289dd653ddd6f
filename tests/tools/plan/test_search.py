"""Which configurations fit, and which is recommended."""

from dataclasses import replace

from kit.memory.fit import ENOUGH_TOKENS
from kit.memory.workload import Workload
from kit.strategy.strategies import DDP, FSDP2, HYBRID, OFFLOAD
from kit.tools.plan.hardware import GPUS, parse_gpu
from kit.tools.plan.models import find_shape
from kit.tools.plan.search import options, recommend, strategies

BASE = Workload(shape=find_shape("llama-8b"), method="lora", length=2048, gradient_checkpointing=True)
GPU = parse_gpu("24GiB")[0]


def test_only_sensible_strategies_are_tried():
    def configs(**changes):
        return [way.config for way in strategies(replace(BASE, **changes))]

    assert configs() == ["single"]
    assert configs(method="full", num_gpus=8) == ["ddp", "fsdp", "fsdp_offload"]
    assert configs(method="qlora", num_gpus=8) == ["ddp", "fsdp"]
    assert configs(method="full", num_gpus=8, optim="adamw_8bit") == ["ddp"]
    found = [(o.workload.method, o.workload.strategy) for o in options(replace(BASE, num_gpus=8), GPU, 32)]
    assert found[:4] == [("full", DDP), ("full", FSDP2), ("full", OFFLOAD), ("lora", DDP)]
    (hybrid,) = [way for way in strategies(replace(BASE, num_gpus=12, gpus_per_machine=4)) if way.strategy == HYBRID]
    assert hybrid.num_replicas == 3


def test_the_recommended_way_is_the_simplest_of_the_fastest():
    """The slower the network, the more a copy on each machine gains."""
    base = replace(BASE, method="full", length=4096, num_gpus=16)
    for network, config in ((16, "fsdp"), (1 / 16, "fsdp_hybrid")):
        gpu = replace(GPUS["h100"], network=GPUS["h100"].network * network)
        assert recommend(options(base, gpu, 512), "full").workload.config == config
    assert recommend(options(replace(BASE, num_gpus=8), GPUS["h100"], 64), "lora").workload.strategy == DDP


def test_the_recommended_way_fits_deals_the_global_batch_and_keeps_the_method_if_that_fits():
    for text in ("24GiB", "80GB", "h100", "rtx4090"):
        option = recommend(options(BASE, parse_gpu(text)[0], 32), "lora")
        own = option.workload
        assert option.fits and own.method == "lora" and own.rows * own.micro_batches * own.num_gpus == 32
        assert own.tokens <= ENOUGH_TOKENS
    assert recommend(options(replace(BASE, method="full"), GPU, 32), "full").workload.method == "lora"
    assert recommend(options(BASE, parse_gpu("4GiB")[0], 32), "lora") is None
