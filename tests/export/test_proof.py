"""A written model is compared with the one that was trained, on rows of the run, and a difference is an error."""

import math

import numpy as np
import pytest
from data_helpers import chat, write

from kit.config.recipe import Recipe
from kit.export.proof import (
    NUM_ROWS,
    TEXTS,
    Rows,
    change_between,
    check_change,
    check_ids,
    find_rows,
    score,
)
from kit.model.build import build_model, open_config
from kit.model.load_plan import LoadPlan
from kit.model.pretrained.tokenizer import open_tokenizer
from kit.system.errors import TrainingError


def test_the_change_is_the_mean_of_absolute_differences_and_the_largest():
    change = change_between(np.array([-1.0, -2.0, -3.0, -4.0]), np.array([-1.5, -1.5, -3, -4]))
    assert (change.mean, change.largest, change.num_tokens) == (0.25, 0.5, 4)
    for value in (math.nan, -math.inf):  # is beyond any bound
        with pytest.raises(TrainingError, match="nothing was written"):
            check_change("model", change_between(np.array([-1.0]), np.array([value])), 1e9)


def test_a_change_beyond_the_bound_is_an_error_that_names_the_bound_to_type():
    change = change_between(np.array([-1.0]), np.array([-1.5]))
    assert "(bound 0.5)" in check_change("model", change, 0.5)
    with pytest.raises(
        TrainingError, match=r"\(bound 0.4\): beyond the bound, so nothing was written. --max_change 0.5 accepts"
    ):
        check_change("model", change, 0.4)


def test_another_id_is_an_error_that_shows_where():
    expected = [("red", [1, 2]), ("red cat", [1, 2, 3])]
    assert check_ids("llama.cpp", expected, [[1, 2], [1, 2, 3]]) == "llama.cpp: ids equal for 2 of 2 texts"
    for wrong in ([1, 2, 4], [1, 2]):
        with pytest.raises(TrainingError, match=r"of 'red cat' token 2 is .* trained on \[3\]; nothing was written"):
            check_ids("llama.cpp", expected, [[1, 2], wrong])


@pytest.fixture
def opened(model_folder):
    recipe = Recipe(model_name_or_path=str(model_folder), dataset="x.jsonl", max_length=64)
    return recipe, open_tokenizer(recipe)


def test_rows_are_the_run_s_own_else_texts_of_the_kit(opened, tmp_path):
    recipe, tokenizer = opened
    many = [chat(f"red {i}", "blue cat") for i in range(NUM_ROWS + 3)]
    write(tmp_path / "eval.jsonl", *many)
    run = recipe.model_copy(update={"eval_dataset": str(tmp_path / "eval.jsonl")})
    rows = find_rows(run, tokenizer, 99)
    assert rows.origin == f"the run's first evaluation rows ({NUM_ROWS})" and len(rows.ids) == NUM_ROWS
    answer = [rows.ids[0][at] for at in rows.compared[0]]
    assert tokenizer.decode(answer).startswith("blue cat") and sum(map(len, rows.compared)) == NUM_ROWS * len(answer)
    short = run.model_copy(update={"max_length": len(answer) + 1, "excess_length_strategy": "keep_end"})
    assert find_rows(short, tokenizer, 99).origin == rows.origin
    assert len(find_rows(recipe, tokenizer, 99).ids) == 3  # its data are gone
    tokenizer.chat_template = None
    assert len(find_rows(None, tokenizer, 99).ids) == len(TEXTS)


def test_scores_are_those_of_the_next_token(opened):
    recipe = opened[0].model_copy(update={"method": "full"})
    model = build_model(recipe, open_config(recipe), LoadPlan(compute_dtype="float32", device="cpu"))
    found = score(model, Rows([[1, 5, 6], [1, 7]], [[1, 2], [1]], ""))
    assert found.shape == (3,) and (found < 0).all()
    again = score(model, Rows([[1, 5, 6]], [[2]], ""))
    assert found[1] == pytest.approx(again[0], abs=1e-6)
