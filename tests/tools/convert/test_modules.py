"""Lists and simple expressions of modules become names; what says more stays an expression."""

import pytest

from kit.tools.convert.draft import Draft, Group
from kit.tools.convert.modules import put_initialisation, put_patterns, put_targets


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("all", "all-linear"),
        (["all-linear"], "all-linear"),
        ("q_proj,v_proj", ["q_proj", "v_proj"]),
        (["self_attn.q_proj"], ["self_attn.q_proj"]),
        (r"model.layers.[\d]+.(mlp|self_attn).(up|q)_proj", ["up_proj", "q_proj"]),
        (r"^model\.layers\.\d+\.mlp\.down_proj$", ["down_proj"]),
        (r"model\.layers\.[0-4]\.mlp\.down_proj", r"model\.layers\.[0-4]\.mlp\.down_proj"),
        (r".*\.layers\.\d+\.mlp\.(?!gate)\w+", r".*\.layers\.\d+\.mlp\.(?!gate)\w+"),
        (r"model.language_model.layers.[\d]+.(_checkpoint_wrapped_module.)?(mlp|self_attn).(up|q)_proj",
         ["up_proj", "q_proj"]),
        (r".*\.layers\.(3|7)\.self_attn\.(q|k)_proj|.*\.mlp\.(gate|up)_proj",
         r".*\.layers\.(3|7)\.self_attn\.(q|k)_proj|.*\.mlp\.(gate|up)_proj"),
        (r"model.layers.[\d]+.mlp.(shared_experts.)?(gate_proj|up_proj)",
         r"model.layers.[\d]+.mlp.(shared_experts.)?(gate_proj|up_proj)"),
        ([r"q_proj|v_proj"], None),
    ],
)  # fmt: skip
def test_targets(given, names):
    draft = Draft({})
    put_targets(draft, given)
    assert draft.values.get("lora_target_modules") == names
    assert [each.group for each in draft.left_out] == ([] if names else [Group.LEARNS])


@pytest.mark.parametrize(
    ("given", "patterns"),
    [
        (["^lm_head.weight$", r"model.layers.\d+.mlp"], ["lm_head.weight", "model.layers.*.mlp*"]),
        (["model.embed.*"], ["model.embed*"]),
        ([r"model.layers.(1|2).mlp"], None),
    ],
)
def test_patterns_of_parameters(given, patterns):
    draft = Draft({})
    put_patterns(draft, "unfrozen_parameters", given, "train_only")
    assert draft.values.get("train_only") == patterns and bool(draft.left_out) == (patterns is None)


@pytest.mark.parametrize(
    ("given", "value", "reason"),
    [
        (True, None, ""),
        ("gaussian", "gaussian", ""),
        ("pissa_niter_16", None, "docs/models.md#initial-values"),
        ("eva", None, "needs passes over data"),
    ],
)
def test_initial_values(given, value, reason):
    draft = Draft({})
    put_initialisation(draft, given, "peft_init_lora_weights")
    assert draft.values.get("init_lora_weights") == value
    assert [reason in each.reason for each in draft.left_out] == ([True] if reason else [])
