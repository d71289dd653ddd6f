"""Keys become words, and settings read as a recipe writes them."""

from kit.config.recipe import Recipe
from kit.tools.report.words import chosen_and_defaults, meaning, setting, start_text, words


def test_keys_become_words():
    cases = [
        ("num_supervised_tokens", "tokens learned from"),
        ("eval_loss/chat", "loss (chat)"),
        ("num_of_a_later_version", "of a later version"),
        ("eval_rewards/margins", "margin"),
        ("eval_rewards/rejected", "reward of rejected"),
        ("logps/chosen", "log-probability of chosen"),
    ]
    for case in cases:
        key, text = case
        assert words(key) == text, case
        assert words("eval_rewards/chosen", {"chosen": "good"}) == "reward of good", case


def test_settings_read_as_a_recipe_writes_them():
    cases = [
        (None, ""),
        (True, "true"),
        (3.0, "3.0"),
        (["a", "b"], "a,b"),
        ({"q": "prompt", "a": "completion"}, "q=prompt,a=completion"),
        ([{"path": "x", "columns": {"q": "text"}, "name": ""}, {"path": "y"}], "path: x, columns: q=text\npath: y"),
        (
            [{"path": "x", "max_samples": 200.0}, {"path": "y", "weight": 0.5}],
            "path: x, max_samples: 200\npath: y, weight: 0.5",
        ),
    ]
    for value, text in cases:
        assert setting(value) == text, (value, text)


def test_what_was_chosen_is_apart_from_defaults():
    chosen, defaults = chosen_and_defaults(Recipe(model_name_or_path="m", dataset="d", lora_r=8, packing=False))
    assert chosen == {"model_name_or_path": "m", "dataset": "d", "lora_r": 8}
    assert defaults["packing"] is False and chosen.keys() | defaults.keys() == Recipe.model_fields.keys()


def test_each_setting_has_a_meaning():
    assert all(meaning(key) for key in Recipe.model_fields) and meaning("unknown") == ""


def test_a_start_says_when_it_was_and_what_was_changed():
    start = {"step": 40, "time": "2026-01-02T03:04:05+00:00", "changed": ["seed: 1 -> 2", "torch: 2.12 -> 2.13"]}
    text = "continued after step 40 (2026-01-02 03:04:05 UTC), changed: seed: 1 → 2; torch: 2.12 → 2.13"
    assert start_text(start) == text
