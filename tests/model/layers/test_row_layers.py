"""Trainable token rows compute what peft's own layer computes, without a copy of the table."""

import pytest
import torch
from model_helpers import FP32, build
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

TOKENS = ["<|im_end|>", "<|im_start|>"]


@pytest.mark.slow
@pytest.mark.parametrize("tie", [False, True])
def test_rows_have_the_outputs_and_gradients_of_pefts_layer(recipe, model_folder, tied, tie):
    """The kit computes them without a copy of the table; peft's own layer is the reference."""
    folder = tied if tie else model_folder
    ours = build(recipe(folder, trainable_tokens=TOKENS, lora_r=4), FP32)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = ["model.embed_tokens"] if tie else ["model.embed_tokens", "lm_head"]
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=32, target_modules="all-linear",
                        trainable_token_indices={name: [1, 2] for name in names})  # fmt: skip
    theirs = get_peft_model(base, config)
    theirs.load_state_dict(ours.state_dict())
    ids = torch.tensor([[1, 40, 2, 50, 1, 2, 60, 2]])
    mask = torch.ones_like(ids)
    logits = [model(input_ids=ids, attention_mask=mask).logits for model in (ours, theirs)]
    assert torch.allclose(*logits, atol=1e-6)
    ours(input_ids=ids, attention_mask=mask, target_positions=torch.arange(7), targets=ids[0, 1:]).sum().backward()
    torch.nn.functional.cross_entropy(logits[1][0, :-1].float(), ids[0, 1:], reduction="sum").backward()
    gradients = [{name: p.grad for name, p in m.named_parameters() if p.grad is not None} for m in (ours, theirs)]
    assert gradients[0].keys() == gradients[1].keys() and any("delta" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], atol=1e-5), name
    assert any(gradient.abs().max() > 1e-3 for name, gradient in gradients[0].items() if "delta" in name)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"trainable_tokens": TOKENS}, {"lora_modules_to_save": ["embed_tokens"]}])
def test_tied_weights_stay_tied_when_the_model_moves(recipe, tied, changes):
    """As Accelerate moves it for FSDP2. Rows and whole modules are tied too, not only the frozen table."""
    model = build(recipe(tied, **changes), FP32)
    names = {name for name, _ in model.named_parameters()}
    model.to("meta")
    model.tie_weights()
    assert {name for name, _ in model.named_parameters()} == names
    base = model.get_base_model()
    assert base.get_input_embeddings().weight is base.get_output_embeddings().weight
