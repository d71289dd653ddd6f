"""The tiled MLP gives the same losses bit for bit, and the same gradients up to the order of their sums."""

import pytest
import torch
from model_helpers import BF16, FP32, build

from kit.config.recipe import Recipe
from kit.model.build import build_meta_model, check_model, open_config
from kit.model.layers import tiled_mlp


def recipe(**settings):
    values = {"gradient_checkpointing": True, "tiled_mlp": True, **settings}
    return Recipe(model_name_or_path="recipes/tiny/model", dataset="x.jsonl", **values)


def trained(settings, plan):
    """Losses and gradients of two rows, and the largest number of tokens that an MLP has seen at once."""
    model = build(settings, plan)
    seen = []
    for module in model.modules():
        if type(module).__name__ == "LlamaMLP":
            module.down_proj.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[:-1].numel()))
    ids = torch.arange(2 * 100).reshape(2, 100) * 7 % 1000
    at = torch.arange(0, 200, 3)
    with torch.autocast("cpu", torch.bfloat16, enabled=plan is BF16):
        losses = model(input_ids=ids, target_positions=at, targets=at)
    losses.sum().backward()
    return losses.detach(), [p.grad for p in model.parameters() if p.grad is not None], max(seen)


@pytest.mark.parametrize(
    ("method", "plan", "tolerance"), [("full", FP32, 1e-5), ("lora", FP32, 1e-5), ("qlora", BF16, 2e-2)]
)
def test_a_tiled_row_gives_the_loss_and_gradients_of_the_whole_row(monkeypatch, method, plan, tolerance):
    monkeypatch.setattr(tiled_mlp, "TILE", 32)
    whole, expected, most = trained(recipe(method=method, tiled_mlp=False), plan)
    losses, gradients, most_in_tiles = trained(recipe(method=method), plan)
    assert (most, most_in_tiles) == (200, 32)
    torch.testing.assert_close(losses, whole, rtol=1e-6, atol=0)  # a product of fewer rows may sum in another order
    for found, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))


@pytest.mark.parametrize(("family", "more"), [("Olmo", {}), ("Cohere", {"use_qk_norm": True})])
def test_norms_without_a_weight_and_norms_of_heads_are_not_tiled(monkeypatch, family, more):
    import transformers

    monkeypatch.setattr(tiled_mlp, "TILE", 8)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{family}Config")(**shape, **heads, **more)
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.arange(60).reshape(2, 30)
    expected = model(ids).logits
    tiled_mlp.install_tiled_mlp(model)
    torch.testing.assert_close(model(ids).logits, expected)


def test_layers_without_such_an_mlp_are_refused(tmp_path):
    from transformers import GPT2Config

    GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64).save_pretrained(tmp_path)
    settings = recipe(method="full").model_copy(update={"model_name_or_path": str(tmp_path)})
    config = open_config(settings)
    problems = check_model(settings, config, build_meta_model(settings, config), needs_weights=False)
    assert [problem.where for problem in problems] == ["tiled_mlp"]
