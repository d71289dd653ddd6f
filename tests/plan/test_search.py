"""What fits, how far it could go, and what is recommended."""

from dataclasses import replace

import pytest

from kit.plan.hardware import GPUS, parse_gpu
from kit.plan.models import find_shape
from kit.plan.search import ENOUGH_TOKENS, fewest, options, recommend, scaling, strategies, try_out
from kit.plan.workload import Workload

BASE = Workload(shape=find_shape("llama-8b"), method="lora", length=2048, gradient_checkpointing=True)
GPU = parse_gpu("24GiB")


def test_the_largest_micro_batch_and_length_are_the_last_that_fit():
    option = try_out(BASE, GPU)
    rows, length = option.largest_rows, option.largest_length
    assert rows > 1 and try_out(replace(BASE, rows=rows), GPU).fits
    assert not try_out(replace(BASE, rows=rows + 1), GPU).fits
    assert try_out(replace(BASE, length=length), GPU).fits
    assert not try_out(replace(BASE, length=length + 1), GPU).fits


def test_a_run_fits_to_the_byte():
    peak = try_out(BASE, GPU).memory.peak
    exact, short = (try_out(BASE, replace(GPU, memory=memory)) for memory in (peak, peak - 1))
    assert (exact.fits, exact.spare, short.fits, short.spare) == (True, 0, False, -1)


def test_nothing_is_longer_than_the_model_reads():
    mistral = replace(BASE, shape=find_shape("llama-2-7b"))
    assert try_out(mistral, parse_gpu("200GiB")).largest_length == 4096


def test_where_nothing_fits_the_largest_is_0():
    option = try_out(replace(BASE, method="full"), GPU)
    assert (option.fits, option.largest_rows, option.largest_length) == (False, 0, 0) and option.spare < 0


def test_only_ways_that_make_sense_are_tried():
    assert strategies(1, "full", "adamw_torch_fused") == ["single"]
    assert strategies(8, "full", "adamw_torch_fused") == ["ddp", "fsdp2", "offload"]
    assert strategies(8, "qlora", "adamw_torch_fused") == ["ddp", "fsdp2"]
    assert strategies(8, "full", "adamw_8bit") == ["ddp"]
    found = options(replace(BASE, num_gpus=8), GPU)
    assert [(o.workload.method, o.workload.strategy) for o in found][:4] == [
        ("full", "ddp"),
        ("full", "fsdp2"),
        ("full", "offload"),
        ("lora", "ddp"),
    ]
    assert {o.workload.strategy for o in options(replace(BASE, num_gpus=8), GPU, only="fsdp2")} == {"fsdp2"}


def test_the_recommended_way_fits_and_deals_the_global_batch():
    for text in ("24GiB", "80GB", "h100", "rtx4090"):
        option, reason = recommend(options(BASE, parse_gpu(text)), "lora", 32)
        own = option.workload
        assert option.fits and own.rows * own.micro_batches * own.num_gpus == 32 and reason
        assert own.tokens <= ENOUGH_TOKENS


def test_the_method_is_kept_if_it_fits_and_a_smaller_one_is_named_if_not():
    option, _ = recommend(options(BASE, GPU), "lora", 32)
    assert option.workload.method == "lora"
    option, reason = recommend(options(replace(BASE, method="full"), GPU), "full", 32)
    assert option.workload.method == "lora" and "full does not fit in any way" in reason
    assert recommend(options(BASE, parse_gpu("4GiB")), "lora", 32) is None


def test_checkpointing_is_left_out_where_there_is_room():
    option, reason = recommend(options(BASE, GPUS["h100"]), "lora", 32)
    assert not option.workload.gradient_checkpointing and "without gradient checkpointing" in reason
    option, reason = recommend(options(BASE, GPU), "lora", 32)
    assert option.workload.gradient_checkpointing and "needs gradient checkpointing" in reason


def test_sharding_is_recommended_only_where_copies_do_not_fit():
    for method, strategy in (("lora", "ddp"), ("full", "fsdp2")):
        base = replace(BASE, method=method, num_gpus=8)
        option, _ = recommend(options(base, GPUS["h100"]), method, 64)
        assert option.workload.strategy == strategy


def test_the_fewest_gpus_are_found():
    base = replace(BASE, method="full", strategy="fsdp2")
    option = fewest(base, GPUS["h100"], [1, 2, 4, 8])
    assert option.workload.num_gpus == 2 and option.fits
    assert fewest(base, parse_gpu("8GiB"), [1, 2]) is None


def test_communication_grows_with_the_gpus_and_groups_hold_it_down():
    rows = scaling(BASE, GPUS["h100"])
    assert [row.num_gpus for row in rows] == [2**n for n in range(3, 13)]
    shares = [row.sent_share for row in rows]
    assert shares == sorted(shares)
    assert rows[-1].group < 4096 and rows[-1].group_sent_share < rows[-1].sent_share
    assert scaling(BASE, GPU) == []


@pytest.mark.parametrize("gpu", ["24GiB", "h100"])
def test_the_other_side_of_checkpointing_is_the_same_run(gpu):
    option = try_out(BASE, parse_gpu(gpu))
    other = option.other_checkpointing()
    assert not other.workload.gradient_checkpointing and other.memory.peak > option.memory.peak
    assert other.other_checkpointing().memory == option.memory
