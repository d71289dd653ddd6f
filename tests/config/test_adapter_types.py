"""Tensors of adapters are told from those of the base, and the kind of a saved adapter is found, as peft names them."""

import pytest
import torch
from peft import LoraConfig, OFTConfig, PeftType, get_peft_model

from kit.config.adapter_types import ADAPTER_TYPES, adapter_type_of, is_of_adapter, module_adapted_by


class Base(torch.nn.Module):
    """An embedding, and a layer whose name begins as those of adapters do."""

    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Embedding(8, 4)
        self.loranger = torch.nn.ModuleDict({"often": torch.nn.Linear(4, 4)})


@pytest.mark.parametrize(
    ("config", "adapted"),
    [
        (LoraConfig(target_modules=["often", "rows"], r=2), {"loranger.often", "rows"}),
        (LoraConfig(target_modules=["often"], r=2, use_dora=True), {"loranger.often"}),
        (OFTConfig(target_modules=["often"], oft_block_size=2), {"loranger.often"}),
    ],
)
def test_the_tensors_that_peft_adds_are_of_the_adapter_and_one_of_each_module_starts_at_zero(config, adapted):
    base = Base()
    model = get_peft_model(base, config)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained and {name for name, _ in model.named_parameters() if is_of_adapter(name)} == set(trained)
    starting = {name: module_adapted_by(name) for name, _ in model.named_parameters() if module_adapted_by(name)}
    assert sorted(starting.values()) == sorted(adapted)
    assert not any(trained[name].any() for name in starting)
    assert not any(is_of_adapter(name) or module_adapted_by(name) for name, _ in Base().named_parameters())


def test_each_kind_is_one_of_peft_and_every_other_of_peft_has_none():
    kinds = {kind: adapter_type_of(kind.value) for kind in PeftType}
    assert {kind.value.lower() for kind, name in kinds.items() if name} == set(ADAPTER_TYPES)
    assert all(name == kind.value.lower() for kind, name in kinds.items() if name)
    assert adapter_type_of("None") is None
