"""``kit chat`` passes on the flags of the recipe."""

from kit.cli.main import main


def test_flags_of_the_recipe_are_passed_on(model_folder, monkeypatch):
    asked = []
    monkeypatch.setattr("kit.tools.chat.talk", lambda *words: asked.append(words))
    words = ["--base", "--method", "qlora", "--temperature", "0.5", "--seed", "7"]
    for run in ([str(model_folder)], ["--model_name_or_path", str(model_folder)]):
        assert main(["chat", *run, *words]) == 0
        request, with_base, is_plain = asked.pop()
        recipe = request.recipe
        assert (with_base, is_plain, recipe.model_name_or_path) == (True, False, str(model_folder))
        assert (recipe.method, recipe.temperature, recipe.seed, recipe.max_new_tokens) == ("qlora", 0.5, 7, 512)
