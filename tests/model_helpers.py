"""A model built and checked as the scripts do it."""

from kit.model.load import build_meta_model, build_model, check_model, open_config
from kit.model.plan import LoadPlan

BF16 = LoadPlan(compute_dtype="bfloat16", device="cpu")
FP32 = LoadPlan(compute_dtype="float32", device="cpu")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build(recipe, plan):
    return build_model(recipe, open_config(recipe), plan)


def problems(recipe):
    """As the script collects them, as one text."""
    config = open_config(recipe)
    return "\n".join(map(str, check_model(recipe, config, build_meta_model(recipe, config))))
