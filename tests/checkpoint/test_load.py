"""A checkpoint restores every bit, under its own model and optimiser and no other."""

import pytest
from checkpoint_helpers import build, same, save_checkpoint

from kit.checkpoint.load import load_checkpoint
from kit.system.errors import UserError


@pytest.mark.slow
def test_saving_and_loading_an_optimiser_that_has_not_stepped_leaves_it_so(folders, tmp_path):
    """The first steps may all have been skipped."""
    model, optimizer = build(folders["untied"], method="full", optim="adamw_8bit")
    path = save_checkpoint(model, optimizer, tmp_path, {"step": 1})
    assert not optimizer.state
    again, other_optimizer = build(folders["untied"], method="full", optim="adamw_8bit")
    load_checkpoint(again, other_optimizer, path)
    assert not other_optimizer.state and same(again.state_dict(), model.state_dict())


# Another model


def test_adapters_of_another_rank_are_refused_with_both_shapes(folders, saved):
    folder, _ = saved
    model, optimizer = build(folders["untied"], method="lora", lora_r=3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=r"lora_A.*: \[2, 64\]; expected \[3, 64\]"):
        load_checkpoint(model, optimizer, folder / "step-00000003")
    assert same(model.state_dict(), before)


@pytest.mark.slow
def test_a_checkpoint_of_another_method_or_optimiser_is_refused(folders, saved):
    folder, _ = saved
    for settings, message in [
        ({"method": "full"}, "model.model.*absent"),
        ({"method": "lora", "lora_r": 2, "lora_target_modules": "q_proj"}, "expected absent"),
        ({"method": "lora", "lora_r": 2, "optim": "adamw_8bit"}, "another model, method or optimiser"),
    ]:
        with pytest.raises(UserError, match=message):
            load_checkpoint(*build(folders["untied"], **settings), folder / "step-00000003")
