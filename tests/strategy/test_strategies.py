"""One type holds what a strategy is called, and what kind of strategy it is."""

from helpers import ROOT

from kit.strategy.strategies import DDP, FSDP1, FSDP2, HYBRID, OFFLOAD, SINGLE, Strategy

SHIPPED = (SINGLE, DDP, FSDP2, FSDP1, HYBRID, OFFLOAD)


def test_each_shipped_config_has_its_strategy():
    assert {each.config for each in SHIPPED} == {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}


def test_offloading_and_copies_are_variants_of_fsdp2():
    assert [each.name for each in SHIPPED] == ["single", "ddp", "fsdp2", "fsdp1", "fsdp2", "fsdp2"]
    assert [each.title for each in SHIPPED] == ["Single", "DDP", "FSDP2", "FSDP1", "FSDP2", "FSDP2"]
    assert [each for each in SHIPPED if each.shards] == [FSDP2, FSDP1, HYBRID, OFFLOAD]


def test_a_variant_without_a_config_of_its_own_has_the_closest_one():
    assert Strategy("fsdp1", offloads=True).config == "fsdp1"
    assert Strategy("fsdp2", offloads=True, replicates=True).config == "fsdp_offload"
