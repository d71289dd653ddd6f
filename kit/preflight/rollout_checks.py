"""Checks of rollouts before the model is loaded: the vLLM server, and the reward functions."""

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel

from kit.data.read.sources import FIX_ROWS, shown
from kit.data.samples.samples import Samples
from kit.rollouts.generation import ANY_ANSWER, reference_of
from kit.rollouts.vllm_client import FIELD, Client, Gone
from kit.scoring.own_metric import is_own, key_of
from kit.scoring.rewards import Attempt, Scorer, reward, takes_expected
from kit.strategy.processes.launcher import cores_of_rank
from kit.system.console import progress
from kit.system.errors import Problem, Problems, UserError, raise_if

if TYPE_CHECKING:
    from kit.config.recipe import Recipe


class _Model(BaseModel):
    max_model_len: int | None = None
    parent: str | None = None


class _Models(BaseModel):
    data: list[_Model]


def check_server(recipe: "Recipe") -> None:
    """Check that the server is up and can serve this run. Waits for it.

    Raises:
        UserError: it is not, or cannot.
    """
    client = Client(recipe)
    what, path, fix = "adapters", "/v1/load_lora_adapter", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve ... "
    fix += "--enable-lora --max-lora-rank R"
    if recipe.method == "full":
        what, path, fix = "weights", "/weight_info", "VLLM_SERVER_DEV_MODE=1 vllm serve ..."
    client.wait()
    try:
        models = _Models.model_validate_json(client.call("/v1/models"), strict=True).data
        longest = min(model.max_model_len or 0 for model in models if not model.parent)
        takes_it = client.ask(path, None if recipe.method == "full" else {})[0] != 404  # of no adapter
    except (Gone, ValueError) as error:
        raise UserError(Problem(FIELD, f"{client.url}: {str(error)[:300]}", "a vLLM server")) from None
    if longest < recipe.max_length:
        longer = f"vllm serve ... --max-model-len {recipe.max_length}"
        found = f"{client.url} takes {longest} tokens"
        raise UserError(Problem(FIELD, found, f"max_length {recipe.max_length}", longer))
    if not takes_it:
        raise UserError(Problem(FIELD, f"{client.url} takes no {what} while it runs", "one that does", fix))


def check_references(flag: str, names: Sequence[str], samples: Samples) -> None:
    """Check that no reward or metric compares with a reference answer that a row lacks. Raises ``UserError``.

    Args:
        flag: that names them.
    """
    if not len(samples.without_reference):
        return
    found = f"compares with the reference answer, and {samples.origin(int(samples.without_reference[0]))} has none"
    problems = []
    for name in filter(takes_expected, names):
        fix = "an assistant message, last; or its column: --dataset_columns COLUMN=completion"
        if is_own(name):
            fix = f"def {key_of(name)}(answer, row): does without it, and row has all columns"
        problems.append(Problem(f"{flag} {name}", found, fix=fix))
    raise_if(problems)


def check_evaluation(recipe: "Recipe", samples: Samples) -> None:
    """Check that something can be measured on evaluation data of which some are prompts alone. Raises ``UserError``."""
    if not len(samples.without_reference):
        return
    origin, are_all = samples.origin(int(samples.without_reference[0])), len(samples.without_reference) == len(samples)
    if are_all and not recipe.predict_with_generate:
        found, fix = "no row has a reference answer, so there is no loss", "--predict_with_generate true: eval_reward"
        raise UserError("eval_dataset", found, fix=fix)
    if recipe.predict_with_generate:
        check_references("--metrics", [name for name in recipe.metrics if name != "exact_match"], samples)
        check_references("--rewards", recipe.rewards, samples)
    lacks = ("eval_exact_match", *["eval_loss"] * are_all)
    if (recipe.keep_best or recipe.early_stopping_patience) and recipe.metric_for_best_model.startswith(lacks):
        found = f"{recipe.metric_for_best_model}, which needs reference answers, and {origin} has none"
        raise UserError("metric_for_best_model", found, fix="--metric_for_best_model eval_reward")


def try_rewards(recipe: "Recipe", train: Samples, tokenizer: Any) -> list[str]:
    """Score expected answers as if the model gave them: all of them by ``math``, the first one by the user's functions.

    A prompt alone is answered with ``ANY_ANSWER``, by the user's functions only.

    Returns:
        A line for each reward that is 0 for all of them.

    Raises:
        UserError: a reward function of the user fails, or ``math`` cannot read an expected answer.
    """

    def expected(i: int) -> Attempt:
        text = reference_of(tokenizer, train, i)
        return Attempt(text, ANY_ANSWER if text is None else text, None, train.origin(i), 1, recipe.max_new_tokens)

    def scored(name: str, attempts: Sequence[Attempt]) -> list[list[float | str]]:
        with closing(Scorer([name], recipe.reward_timeout, cores_of_rank())) as scorer:
            submitted = [scorer.submit(each) for each in attempts]
            return [each.result() for each in progress(submitted, "expected answers", len(submitted))]

    notes, problems = [], Problems()
    alone, with_answer = train.without_reference.tolist(), np.flatnonzero(train.num_targets).tolist()
    for name in recipe.rewards:
        if is_own(name) and not recipe.environment:  # else see ``try_environment``
            tried = [expected(i)._replace(row=train.data_rows([i]).get(i)) for i in [*with_answer[:1], *alone[:1]]]
            for [found] in scored(name, tried):
                if isinstance(found, str):
                    problems.append(Problem("--rewards", f"failed when tried: {found}"))
        elif name == "math":
            every = [*{each.expected: each for each in map(expected, with_answer)}.values()]  # one of equals
            problems += shown(
                [
                    Problem(each.origin, f"math-verify cannot read {each.answer[:60]!r}")
                    for each, found in zip(every, scored(name, every), strict=True)
                    if found != [1.0]
                ],
                "--rewards math",
                FIX_ROWS,
            )
        elif (
            key_of(name) in ("number", "json", "regex")
            and with_answer
            and not any(reward(name, expected(i)) for i in with_answer)
        ):
            notes.append(f"warning: --rewards {name} is 0 for the expected answer of every row")
    problems.raise_if_any()
    return notes
