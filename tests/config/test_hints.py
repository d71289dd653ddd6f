"""A value in the wrong place is answered by what it means: another setting, or what other kits call it."""

from kit.config.hints import hint_for_value


def test_a_value_that_another_setting_or_another_program_has_is_answered():
    cases = [
        ("method", "oft", "--method lora --adapter_type oft"),
        ("objective", "sigmoid", "use dpo_loss: sigmoid"),
        ("objective", "ppo", "lists the objectives"),
        ("report_to", "wandb,Aim", "metrics.jsonl has each number"),
        ("init_lora_weights", "pissa_niter_16", "docs/models.md#lora-initialisation"),
    ]
    for setting, value, hint in cases:
        assert hint in hint_for_value(setting, value), (setting, value, hint)
    for setting, value in (("objective", "dop"), ("optim", "dpo"), ("attn_implementation", "flex"), ("report_to", "x")):
        assert hint_for_value(setting, value) == ""  # a slip, which the spelling answers
