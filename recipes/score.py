"""Score a base model, a ``final/`` folder, an adapter or a checkpoint on a data set; any strategy, any finetune flag.

    accelerate launch recipes/score.py --model_name_or_path runs/tiny-single/final --eval_dataset my.jsonl
    accelerate launch recipes/score.py --model_name_or_path runs/tiny-single/checkpoints/step-00000120 \\
        --eval_dataset my.jsonl --predict_with_generate --max_new_tokens 64
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this clone's kit, installed or not

from kit import launch
from kit.command_line import read_command_line
from kit.errors import Problem, Problems, UserError


def main() -> None:
    """Print one JSON line of metrics, and a few answers with ``--predict_with_generate``."""
    # Nothing is trained on, so the evaluation data stands for the training data too.
    recipe, topology = launch.resolve(read_command_line(sys.argv[1:], stands_for={"eval_dataset": "dataset"}))
    if recipe.eval_dataset is None:
        raise UserError(Problem("eval_dataset", "missing", "the data to score on", "add --eval_dataset"))

    from kit import checkpoint, data, model, strategy
    from kit.evaluate import evaluate
    from kit.log import progress, silence_libraries
    from kit.optim import build_optimizer

    silence_libraries()
    target = Path(recipe.model_name_or_path)
    is_checkpoint = (target / checkpoint.MANIFEST).is_file()
    if is_checkpoint:
        checkpoint.find_checkpoint(target.parent, str(target), launch.say)
        trained = json.loads((target.parents[1] / "run.json").read_text())["recipe"]
        keys = ("model_name_or_path", "model_revision", "method", "adapter_name_or_path", "chat_template")
        keys += tuple(key for key in trained if key.startswith(("lora_", "use_")))
        recipe = recipe.model_copy(update={key: trained[key] for key in keys})
    elif (target / "adapter_config.json").is_file():
        base = json.loads((target / "adapter_config.json").read_text())["base_model_name_or_path"]
        update = {"model_name_or_path": base, "adapter_name_or_path": str(target), "method": "lora"}
        recipe = recipe.model_copy(update=update)
    else:
        recipe = recipe.model_copy(update={"method": "full"})

    problems = Problems()
    with problems.caught():
        config = model.open_config(recipe)
        problems += model.check_model(recipe, config, model.build_meta_model(recipe, config))
    with problems.caught():
        tokenizer = model.open_tokenizer(recipe)
        datasets = data.open_data(
            recipe, data.open_sources(recipe), tokenizer, config.get_text_config().vocab_size, launch.is_main()
        )
    problems.raise_if_any()

    accelerator, plan = strategy.start(recipe, topology)
    llm = model.build_model(recipe, config, plan)
    llm, optimizer, actual = strategy.prepare(accelerator, topology, llm, build_optimizer(llm, recipe))
    if is_checkpoint:
        checkpoint.load_checkpoint(llm, optimizer, target)
    assert datasets.evaluation is not None
    result = evaluate(accelerator, llm, datasets.evaluation, recipe, tokenizer, progress)
    for answer in result.answers:
        launch.say(f"asked {answer.prompt!r}\nexpected {answer.reference!r}\nanswered {answer.text!r}")
    launch.say(json.dumps({"model": str(target), "strategy": actual["type"], **result.metrics}))


if __name__ == "__main__":
    with launch.reporting_errors():
        main()
