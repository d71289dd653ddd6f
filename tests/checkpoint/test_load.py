"""A checkpoint gives back every bit, under the model and optimiser it was made with and no other."""

import bitsandbytes.optim
import pytest
import torch
from checkpoint_helpers import build, same, save_checkpoint, train

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


@pytest.mark.slow
def test_moments_in_paged_memory_stay_there(folders, tmp_path, monkeypatch):
    """A GPU alone has paged memory; here the tensors that bitsandbytes made in place of it."""
    made = []

    def get_state_buffer(self, p, dtype):
        made.append(torch.zeros_like(p, dtype=dtype))
        made[-1].is_paged = True
        return made[-1]

    monkeypatch.setattr(bitsandbytes.optim.PagedAdamW32bit, "get_state_buffer", get_state_buffer)
    monkeypatch.setattr(bitsandbytes.optim.PagedAdamW32bit, "prefetch_state", lambda self, p: None)
    model, optimizer = build(folders["untied"], method="lora", optim="paged_adamw_32bit")
    train(model, optimizer, [0])
    path = save_checkpoint(model, optimizer, tmp_path, {"step": 1})
    again, other_optimizer = build(folders["untied"], method="lora", optim="paged_adamw_32bit")
    load_checkpoint(again, other_optimizer, path)
    found = [state[key] for state in other_optimizer.state.values() for key in ("state1", "state2")]
    saved = [state[key] for state in optimizer.state.values() for key in ("state1", "state2")]
    assert {id(tensor) for tensor in found} <= {id(tensor) for tensor in made} and found
    assert all(map(torch.equal, found, saved))


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
