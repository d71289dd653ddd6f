"""``kit chat`` passes on the flags of the recipe."""

from kit.cli.chat import _own_flags


def test_flags_of_the_recipe_are_passed_on():
    with_base, is_plain, words = _own_flags(
        ["model", "--base", "--method", "qlora", "--temperature", "0.5", "--seed", "7"]
    )
    assert (with_base, is_plain) == (True, False)
    assert words == [
        "--method=qlora",
        "--temperature=0.5",
        "--seed=7",
        "--model_name_or_path=model",
        "--max_new_tokens=512",
    ]
