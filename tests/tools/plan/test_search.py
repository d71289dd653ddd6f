"""What fits, how far it could go, and what is recommended."""

import math
from dataclasses import replace

from kit.memory.fit import ENOUGH_TOKENS, MARGIN
from kit.memory.workload import Workload
from kit.strategy.strategies import DDP, FSDP2, HYBRID, OFFLOAD
from kit.tools.plan.hardware import GPUS, parse_gpu
from kit.tools.plan.models import find_shape
from kit.tools.plan.search import (
    fewest,
    options,
    recommend,
    smallest,
    strategies,
    try_out,
    tuned,
)

BASE = Workload(shape=find_shape("llama-8b"), method="lora", length=2048, gradient_checkpointing=True)
GPU = parse_gpu("24GiB")


def test_the_largest_length_is_the_last_that_fits():
    length = try_out(BASE, GPU).largest_length
    assert try_out(replace(BASE, length=length), GPU).fits
    assert not try_out(replace(BASE, length=length + 1), GPU).fits
    one, two = replace(BASE, micro_batches=4), replace(BASE, rows=2, micro_batches=2, gradient_checkpointing=False)
    assert try_out(two, GPU).largest_length == try_out(one, GPU).largest_length


def test_a_run_fits_to_the_byte_beside_the_margin():
    least = math.ceil(try_out(BASE, GPU).memory.peak / (1 - MARGIN))
    exact, short = (try_out(BASE, replace(GPU, memory=memory)) for memory in (least, least - 2))
    assert (exact.fits, exact.spare, short.fits) == (True, 0, False) and short.spare < 0


def test_nothing_is_longer_than_the_model_reads():
    mistral = replace(BASE, shape=find_shape("llama-2-7b"))
    assert try_out(mistral, parse_gpu("200GiB")).largest_length == 4096


def test_where_nothing_fits_the_largest_is_0():
    option = try_out(replace(BASE, method="full"), GPU)
    assert (option.fits, option.largest_length) == (False, 0) and option.spare < 0


def test_only_ways_that_make_sense_are_tried():
    def configs(**changes):
        return [way.config for way in strategies(replace(BASE, **changes))]

    assert configs() == ["single"]
    assert configs(method="full", num_gpus=8) == ["ddp", "fsdp", "fsdp_offload"]
    assert configs(method="qlora", num_gpus=8) == ["ddp", "fsdp"]
    assert configs(method="full", num_gpus=8, optim="adamw_8bit") == ["ddp"]
    found = options(replace(BASE, num_gpus=8), GPU, 32)
    assert [(o.workload.method, o.workload.strategy) for o in found][:4] == [
        ("full", DDP),
        ("full", FSDP2),
        ("full", OFFLOAD),
        ("lora", DDP),
    ]
    assert {o.workload.strategy for o in options(replace(BASE, num_gpus=8), GPU, 32, only="fsdp")} == {FSDP2}


def test_hybrid_sharding_has_a_copy_on_each_of_several_whole_machines():
    for num_gpus, here, replicas in ((16, 8, 2), (12, 4, 3), (12, 8, None), (8, 8, None), (4, 1, None)):
        base = replace(BASE, num_gpus=num_gpus, gpus_per_machine=here)
        for method in ("full", "lora", "qlora"):
            found = [way for way in strategies(replace(base, method=method)) if way.config == "fsdp_hybrid"]
            assert [way.num_replicas for way in found] == ([replicas] if replicas else [])
            assert all(way.num_shards == here and way.strategy == HYBRID for way in found)


def test_hybrid_sharding_is_recommended_where_the_network_is_slow_and_a_copy_fits():
    base = replace(BASE, method="full", length=4096, num_gpus=16)
    slow = replace(GPUS["h100"], network=GPUS["h100"].network / 16)
    option, reason = recommend(options(base, slow, 512), "full")
    assert option.workload.config == "fsdp_hybrid" and "each machine holds a copy, sharded over its 8 GPUs" in reason
    option, reason = recommend(options(base, replace(slow, memory=20 * 2**30), 512), "full")
    assert option.workload.config != "fsdp_hybrid" and "full does not fit with ddp or fsdp_hybrid" in reason


def test_of_ways_that_are_about_equally_fast_the_simplest_is_recommended():
    base = replace(BASE, method="full", length=4096, num_gpus=16)
    speeds = {}
    for network in (16, 1, 1 / 16):  # the slower it is, the more a copy on each machine gains
        gpu = replace(GPUS["h100"], network=GPUS["h100"].network * network)
        found = {o.workload.config: sum(o.step.tokens_per_second) for o in options(base, gpu, 512)[:4]}
        option, _ = recommend(options(base, gpu, 512), "full")
        speeds[network] = (found["fsdp_hybrid"] / found["fsdp"], option.workload.config)
    assert {config for gain, config in speeds.values() if gain <= 1.05} == {"fsdp"}
    assert {config for gain, config in speeds.values() if gain > 1.06} == {"fsdp_hybrid"}


def test_what_needs_more_host_memory_than_the_machine_has_does_not_fit():
    base = replace(BASE, method="full", num_gpus=2, gpus_per_machine=2)
    found = options(base, GPU, 32, only="fsdp_offload")
    (full,) = (option for option in found if option.workload.method == "full")
    needed = sum(full.memory.host.values())
    assert full.fits and full.missing_host == 0
    exact, short = (try_out(full.workload, replace(GPU, host=host)) for host in (needed, needed - 1))
    assert exact.fits and not short.fits and (short.missing_host, short.spare) == (1, full.spare)
    option, reason = recommend(options(base, replace(GPU, host=needed - 1), 32), "full")
    assert option.workload.method == "lora" and "full does not fit in any way" in reason


def test_the_recommended_way_fits_and_deals_the_global_batch():
    for text in ("24GiB", "80GB", "h100", "rtx4090"):
        option, reason = recommend(options(BASE, parse_gpu(text), 32), "lora")
        own = option.workload
        assert option.fits and own.rows * own.micro_batches * own.num_gpus == 32 and reason
        assert own.tokens <= ENOUGH_TOKENS


def test_the_method_is_kept_if_it_fits_and_a_smaller_one_is_named_if_not():
    option, _ = recommend(options(BASE, GPU, 32), "lora")
    assert option.workload.method == "lora"
    option, reason = recommend(options(replace(BASE, method="full"), GPU, 32), "full")
    assert option.workload.method == "lora" and "full does not fit in any way" in reason
    assert recommend(options(BASE, parse_gpu("4GiB"), 32), "lora") is None


def test_checkpointing_is_left_out_where_there_is_room():
    option, reason = recommend(options(BASE, GPUS["h100"], 32), "lora")
    assert not option.workload.gradient_checkpointing and "without gradient checkpointing" in reason
    option, reason = recommend(options(BASE, parse_gpu("28GiB"), 32), "lora")
    assert option.workload.gradient_checkpointing == "selective" and "selective gradient checkpointing" in reason
    option, reason = recommend(options(BASE, GPU, 32), "lora")
    assert option.workload.gradient_checkpointing is True and "needs gradient checkpointing" in reason


def test_layers_inputs_are_offloaded_where_nothing_else_fits():
    option, reason = recommend(options(BASE, parse_gpu("18GiB"), 32), "lora")
    assert option.workload.activation_offload and "needs gradient checkpointing and activation_offload" in reason
    assert not recommend(options(BASE, GPU, 32), "lora")[0].workload.activation_offload


def test_more_rows_with_checkpointing_are_taken_only_where_they_are_clearly_faster():
    """On links so slow that gathering the weights less often pays for computing layers again."""
    base = replace(BASE, method="full", strategy=FSDP2, num_gpus=8, length=4096)
    quick = GPUS["h100"]
    slow = replace(quick, link=quick.link / 100)
    ways = [tuned(base, gpu, 64).workload for gpu in (quick, slow)]
    assert not ways[0].gradient_checkpointing and ways[1].gradient_checkpointing and ways[1].rows > ways[0].rows


def test_sharding_is_recommended_only_where_copies_do_not_fit():
    for method, strategy in (("lora", DDP), ("full", FSDP2)):
        base = replace(BASE, method=method, num_gpus=8)
        option, _ = recommend(options(base, GPUS["h100"], 64), method)
        assert option.workload.strategy == strategy


def test_a_way_has_its_best_settings_and_one_that_never_fits_those_that_take_the_least():
    base = replace(BASE, gradient_checkpointing=False, rows=2, length=4096)
    full, lora, _ = options(base, GPUS["rtx4090"], 32)
    best, _ = recommend([full, lora], "lora")
    assert best is lora and lora.fits and lora.workload.gradient_checkpointing
    assert not full.fits and full.workload.gradient_checkpointing and full.workload.rows == 1


def test_the_fewest_gpus_are_found():
    base = replace(BASE, method="full", strategy=FSDP2)
    option = fewest(base, 64, GPUS["h100"])
    assert (option.workload.num_gpus, option.workload.strategy) == (2, FSDP2) and option.fits
    option = fewest(base, 64, parse_gpu("4GiB"), 2)
    assert not option.fits and option.workload.num_gpus == 2 and option.workload.strategy == OFFLOAD


def test_checkpointing_comes_before_more_gpus_and_these_before_offloading():
    option = fewest(replace(BASE, shape=find_shape("llama-3b"), method="full", length=4096), 32, GPUS["rtx4090"])
    assert option.workload.num_gpus == 4 and option.workload.gradient_checkpointing
    assert option.workload.strategy == FSDP2
    full = replace(BASE, method="full")
    assert fewest(full, 32, GPU, 2).workload.strategy == OFFLOAD
    assert fewest(full, 32, GPU, 2).fits
    assert smallest(full, 32, [(replace(GPU, host=2**35), 2)]) is None
    assert fewest(full, 33, GPU, 4).workload.num_gpus == 1  # no other number divides the global batch
