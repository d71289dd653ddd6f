"""``experts_implementation``: each value trains alike, and none is accepted that would have no effect."""

import pytest
import torch
from helpers import make_model
from model_helpers import BF16, FP32, build, problems
from transformers import MixtralConfig, MixtralForCausalLM

from benchmarks import tiny_families

VALUES = ("eager", "grouped_mm", "batched_mm")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a tiny model of a family."""
    top = tmp_path_factory.mktemp("families")

    def made(family):
        folder = top / family
        if not folder.exists():
            tiny_families.make_model(family, folder)
        return folder

    return made


def losses(recipe, plan):
    model, positions = build(recipe, plan), torch.arange(0, 40, 3)
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 43)[None], target_positions=positions, targets=positions)


@pytest.mark.parametrize("family", ["mixtral", "aria"])  # the vision encoder of Aria has no experts
def test_each_implementation_gives_the_same_losses_up_to_rounding(recipe, made, family):
    for value in VALUES:
        assert problems(recipe(made(family), max_length=64, experts_implementation=value)) == ""
    exact, rounded = (
        {value: losses(recipe(made(family), experts_implementation=value), plan) for value in ("auto", *VALUES)}
        for plan in (FP32, BF16)
    )
    assert torch.equal(exact["auto"], exact["grouped_mm"])
    for value in VALUES:
        assert torch.allclose(exact[value], exact["eager"], rtol=1e-6)
    if family == "mixtral":  # where eager rounds the product of each expert, so it was computed in another way
        assert all((rounded[value] != rounded["eager"]).any() for value in VALUES[1:])


@pytest.mark.parametrize("family", [None, "llama4_text"])  # dense; experts that are computed in one way only
def test_a_model_to_which_it_does_not_apply_is_refused(recipe, model_folder, made, family):
    folder = made(family) if family else model_folder
    assert problems(recipe(folder, max_length=64)) == ""
    for value in VALUES:
        found = problems(recipe(folder, max_length=64, experts_implementation=value))
        assert f"experts_implementation: {value}, and Llama" in found and "expected auto" in found


@pytest.mark.slow
def test_a_run_has_the_same_losses_with_another_value(finetune, fp32):
    model = make_model(finetune.folder / "model")
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    experts = {"num_local_experts": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    MixtralForCausalLM(MixtralConfig(**sizes, **experts)).save_pretrained(model)
    flags = {"model_name_or_path": model, "method": "full", "config": fp32["single"], "max_steps": 2}
    eager = finetune.ok("eager", experts_implementation="eager", **flags)
    grouped = finetune.ok("grouped", experts_implementation="grouped_mm", **flags)
    assert [row["loss"] for row in grouped.rows] == pytest.approx([row["loss"] for row in eager.rows], rel=1e-6)
    assert grouped.grad_norms == pytest.approx(eager.grad_norms, rel=1e-5)
