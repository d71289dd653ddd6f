"""The embedded tools and game: the tiny model visibly learns to use them."""

import pytest
from helpers import ROOT, matrix

FOLDER = ROOT / "recipes/tiny-tools"
GAME = {
    "environment": f"{FOLDER}/game.py:LostParcel",
    "rewards": "environment",
    "dataset": FOLDER / "games.jsonl",
    "eval_dataset": FOLDER / "eval_games.jsonl",
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", matrix([{"tools": f"{FOLDER}/tools.py:price,add"}, GAME]))
def test_a_few_steps_of_the_recipe_raise_the_reward(finetune, flags):
    finetune.defaults = {"recipe": "tiny-tools"}
    run = finetune.ok("run", **flags, max_steps=6, eval_steps=6, save_steps=6, max_eval_samples=32)
    before, after = (row for row in run.rows if "eval_reward" in row)
    assert before["eval_reward"] < 0.4 and after["eval_reward"] > before["eval_reward"] + 0.2
    assert after["eval_tools/calls"] > before["eval_tools/calls"]
    assert after["eval_completions/turns"] > before["eval_completions/turns"]
