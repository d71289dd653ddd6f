"""A model built and checked as the scripts do it."""

from kit.model.load import build_meta_model, build_model, check_model, open_config
from kit.model.plan import LoadPlan

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
