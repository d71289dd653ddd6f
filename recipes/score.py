"""Score a base model, a ``final/`` folder, an adapter or a checkpoint on a data set; any strategy, any finetune flag.

    accelerate launch recipes/score.py --model_name_or_path runs/tiny-single/final --eval_dataset my.jsonl
    accelerate launch recipes/score.py --model_name_or_path runs/tiny-single/checkpoints/step-00000120 \\
        --eval_dataset my.jsonl --predict_with_generate --max_new_tokens 64
    accelerate launch recipes/score.py --model_name_or_path BASE --adapter_name_or_path ADAPTER --eval_dataset my.jsonl
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this clone's kit, installed or not

from kit.config.command_line import read_command_line
from kit.config.recipe import Recipe
from kit.errors import Problem, Problems, UserError
from kit.failures import exits
from kit.strategy import launch


def main() -> None:
    """Print one JSON line of metrics, and a few answers with ``--predict_with_generate``."""
    # Nothing is trained on, so the evaluation data stands for the training data too.
    recipe, topology = launch.resolve(read_command_line(sys.argv[1:], stands_for={"eval_dataset": "dataset"}))
    if recipe.eval_dataset is None:
        raise UserError(Problem("eval_dataset", "missing", "the data to score on", "add --eval_dataset"))

    from kit.checkpoint import load as checkpoint
    from kit.data import open as data
    from kit.evaluate import evaluate
    from kit.model import load as model
    from kit.run.log import progress, silence_libraries
    from kit.strategy import accelerator as strategy
    from kit.train.optim import build_optimizer

    silence_libraries()
    scored = recipe.model_name_or_path
    recipe, weights = to_open(recipe)
    problems = Problems()
    tokenizer = config = None
    with problems.caught():
        tokenizer = model.open_tokenizer(recipe)
    with problems.caught():
        config = model.open_config(recipe)
        if "max_length" not in recipe.model_fields_set:
            longest = min(recipe.max_length, model.num_positions(config) or recipe.max_length)
            recipe = recipe.model_copy(update={"max_length": longest})
        problems += model.check_model(recipe, config, model.build_meta_model(recipe, config))
    if tokenizer and config:
        with problems.caught():
            vocab_size = config.get_text_config().vocab_size
            datasets = data.open_data(recipe, data.open_sources(recipe), tokenizer, vocab_size)
    problems.raise_if_any()

    accelerator, plan = strategy.start(recipe, topology)
    llm = model.build_model(recipe, config, plan)
    llm, _, actual = strategy.prepare(accelerator, topology, llm, build_optimizer(llm, recipe))
    if weights:
        checkpoint.load_weights(llm, weights)
    assert datasets.evaluation is not None
    result = evaluate(accelerator, llm, recipe, tokenizer, progress, datasets.evaluation)
    for answer in result.answers:
        launch.say(f"asked {answer.prompt!r}\nexpected {answer.reference!r}\nanswered {answer.text!r}")
    launch.say(json.dumps({"model": scored, "strategy": actual["type"], **result.metrics}))


def to_open(recipe: Recipe) -> tuple[Recipe, Path | None]:
    """The recipe that opens what ``model_name_or_path`` is, and the checkpoint to load into that."""
    from kit.checkpoint import load as checkpoint
    from kit.model import locate as places

    target = Path(os.path.realpath(os.path.expanduser(recipe.model_name_or_path)))
    is_checkpoint = os.path.isfile(target / checkpoint.MANIFEST)
    if target.name == "final" and os.path.isfile(target.parent / "run.json") and recipe.chat_template is None:
        trained, _ = places.read_run(target.parent / "run.json")  # what it learned from looked so
        recipe = recipe.model_copy(update={"chat_template": trained.chat_template})
    adapted = "qlora" if recipe.method == "qlora" else "lora"
    if not is_checkpoint and not os.path.isfile(target / "adapter_config.json"):
        return recipe.model_copy(update={"method": adapted if recipe.adapter_name_or_path else "full"}), None
    if recipe.adapter_name_or_path:
        raise UserError(Problem("adapter_name_or_path", f"{target} brings its own weights", "a base model with it"))
    if not is_checkpoint:
        fix = f"give the base: --model_name_or_path BASE --adapter_name_or_path {target}"
        update = {"model_name_or_path": places.base_of_adapter(target, fix), "adapter_name_or_path": str(target)}
        return recipe.model_copy(update={**update, "method": adapted}), None
    return checkpoint.recipe_of(target, recipe, "model_name_or_path"), target


if __name__ == "__main__":
    with exits.reporting_errors():
        main()
