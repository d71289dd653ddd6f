"""A model built and checked as the scripts do it, and one batch that it learns from."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.tiny_families import tiny_config
from kit.model.build import build_meta_model, build_model, check_model, open_config
from kit.model.load_plan import LoadPlan

BF16 = LoadPlan(compute_dtype="bfloat16", device="cpu")
FP32 = LoadPlan(compute_dtype="float32", device="cpu")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build(recipe, plan):
    coefficient = recipe.router_aux_loss_coef
    settings = {"packing": recipe.packing, "seed": recipe.seed, "router_aux_loss_coef": coefficient}
    return build_model(recipe, open_config(recipe), plan, **settings)


def problems(recipe):
    """As the script collects them, as one text."""
    config = open_config(recipe)
    meta_model = build_meta_model(recipe, config, recipe.packing)
    limits = {"max_length": recipe.max_length, "router_aux_loss_coef": recipe.router_aux_loss_coef}
    return "\n".join(map(str, check_model(recipe, config, meta_model, **limits)))


def on_meta(family):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(family))


def learned(model, autocast=False):
    """The losses of one batch of the embedded tiny model, and the gradients of what trains by name."""
    inputs, positions = torch.arange(80).reshape(2, 40) * 7 % 1000, torch.arange(0, 80, 3)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        losses = model(input_ids=inputs, target_positions=positions, targets=positions)
    losses.sum().backward()
    return {"losses": losses.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def small_llama(**config):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 96} | config
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))


def hidden_and_gradients(model, autocast=True, weights=None):
    """Of a small Llama. The loss is the mean of the squares of hidden states, or of their products with ``weights``."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        hidden = model.model(input_ids=torch.arange(60).view(3, 20), use_cache=False).last_hidden_state
    (hidden.float() * (hidden.float() if weights is None else weights)).mean().backward()
    return [hidden.detach(), *(p.grad for p in model.model.parameters())]
