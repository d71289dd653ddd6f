"""Evaluate a base model, a ``final/`` folder, an adapter or a checkpoint on a dataset, with any strategy.

    accelerate launch recipes/score.py runs/tiny-single my.jsonl
    accelerate launch recipes/score.py --model_name_or_path runs/tiny-single/final --eval_dataset my.jsonl
    accelerate launch recipes/score.py --model_name_or_path runs/tiny-single/checkpoints/step-00000120 \\
        --eval_dataset my.jsonl --predict_with_generate --max_new_tokens 64
    accelerate launch recipes/score.py --model_name_or_path BASE --adapter_name_or_path ADAPTER --eval_dataset my.jsonl
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this clone's kit, installed or not

from kit.system import interrupt

if __name__ == "__main__":
    interrupt.leave_on_ctrl_c()  # also while the imports below run

from kit.config.command_line import read_command_line
from kit.failures import exits
from kit.strategy.launch import launch
from kit.system import phases
from kit.system.console import say
from kit.system.errors import Problem, UserError, raise_if

# The flags that --help lists first. Most others are of training.
FIRST = """
model_name_or_path adapter_name_or_path eval_dataset eval_dataset_split dataset_columns chat_template max_length
max_eval_samples per_device_eval_batch_size predict_with_generate max_new_tokens config num_processes
""".split()
POSITIONAL = ("model_name_or_path", "eval_dataset")  # the flags that positional arguments stand for


def main() -> None:
    """Print the metrics as one line of JSON, and with ``--predict_with_generate`` a few answers before it."""
    # Nothing is trained, so the evaluation data are used where a recipe needs training data.
    request = read_command_line(
        sys.argv[1:], {"eval_dataset": "dataset"}, __doc__ or "", FIRST, POSITIONAL, trains=False
    )
    recipe, topology = launch.resolve(request, trains=False)
    if recipe.has_tools:
        recipe = recipe.model_copy(update={"predict_with_generate": True})
    if recipe.eval_dataset is None:
        raise UserError("eval_dataset", "missing", "the data to score on", "--eval_dataset FILE")

    from kit.evaluate import evaluate
    from kit.model.build import open_base_config, open_config
    from kit.model.pretrained.heads import head_of
    from kit.preflight import preflight
    from kit.run.generation_warnings import missing_prompts, truncated_answers
    from kit.run.model_source import CHECKPOINT, precision_of, reference_of, to_open
    from kit.run.resume import verify_together
    from kit.strategy.precision import supported_precision
    from kit.tasks.objectives import build_objective
    from kit.train.checks.head_proof import prove_head
    from kit.train.policy import build_policy
    from kit.train.precompute import add_reference
    from kit.train.session import Session

    interrupt.end_imports()

    scored = recipe.adapter_name_or_path or recipe.model_name_or_path
    recipe, weights = to_open(recipe)
    is_drawn = recipe.declared.head == "scores" and not weights and not recipe.adapter_name_or_path
    if is_drawn and head_of(open_base_config(recipe)) != "scores":
        found = f"{scored} has no classification head: a new one would be random"
        raise UserError("model_name_or_path", found, "a model that a run with this objective has trained")
    reference = reference_of(scored, recipe, recipe.method)
    if not request.launch.config:
        precision = precision_of(scored, topology.mixed_precision)
        topology, lines = supported_precision(replace(topology, mixed_precision=precision))
        say(*lines)
    checked = preflight.check(recipe, topology)
    recipe, samples = checked.recipe, checked.data.evaluation
    assert samples is not None
    if recipe.declared.has_reference:
        first = reference.adapter_name_or_path or reference.model_name_or_path if reference else ""
        say(f"reference model: {first or 'the model without the adapter'}")

    if request.launch.dry_run:
        scored_on = f"all checks passed, {len(samples)} samples would be scored"
        say(*checked.notes, f"Dry run: {scored_on}; nothing written but the tokenised data in the cache.")
        return
    session = Session(recipe, topology, checked.facts())
    if weights:
        faults = verify_together(session.accelerator, weights)
        raise_if(Problem(CHECKPOINT, f"{weights}: {fault}") for fault in faults)
    if reference:
        began = build_policy(session, reference, open_config(reference), checked.tokenizer)
        session.enter(phases.REFERENCE)
        add_reference(began, reference, checked.data, samples, recipe.eval_batch_size, session.progress)
        del began
        session.accelerator.free_memory()
    policy = build_policy(session, recipe, checked.config, checked.tokenizer, weights=weights)
    say(*prove_head(policy, checked.vocab_size))
    session.enter(phases.EVALUATING)
    objective = build_objective(recipe, samples.dataset_names)
    result = evaluate(policy, objective, checked.data, recipe, session.progress)
    unended_answers = truncated_answers(result.counts, recipe, result.stops)
    for doubt in [*result.doubts(), *unended_answers, *missing_prompts(result.counts)]:
        say(f"warning: {doubt}")
    for answer in result.answers:
        say(
            f"prompt {answer.prompt!r}",
            f"expected {answer.reference!r}",
            f"answer {(answer.conversation or answer.text)!r}",
        )
    intervals = {"intervals": result.intervals} if result.intervals else {}
    measured = {"model": scored, "strategy": policy.strategy.type, **result.metrics, **result.details}
    say(json.dumps(measured | intervals))


if __name__ == "__main__":
    with exits.reporting_errors():
        main()
