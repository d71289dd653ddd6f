"""Fine-tune a model: full, LoRA or QLoRA, on one process, DDP or FSDP, with any objective.

accelerate launch recipes/finetune.py                                    # the embedded tiny default, on anything
accelerate launch recipes/finetune.py --config fsdp                      # the same on FSDP
accelerate launch recipes/finetune.py --config single --recipe llama-8b-qlora --dataset my.jsonl
accelerate launch recipes/finetune.py --help                             # every flag, its unit and default
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this clone's kit, installed or not

from kit.system import interrupt

if __name__ == "__main__":
    interrupt.leave_on_ctrl_c()  # also while the imports below run

from functools import partial

from kit.config.command_line import read_command_line
from kit.failures import exits
from kit.preflight.inputs import check_inputs
from kit.preflight.packages import leave_out_packages
from kit.strategy.launch import launch
from kit.system.console import say


def main() -> None:
    """One run, from top to bottom. If no launcher started its processes, ``resolve`` replaces this one by torchrun."""
    request = read_command_line(sys.argv[1:])
    recipe, topology = launch.resolve(request, check=check_inputs)
    leave_out_packages(recipe)

    # The slow imports come here, so that a mistyped flag is reported before them.
    from kit.evaluate import evaluate
    from kit.export.final import save_final
    from kit.model.layers.embedding_noise import neftune
    from kit.optional_tools import show_dry_run, write_report
    from kit.preflight import preflight
    from kit.run.run import Run
    from kit.system import phases
    from kit.tasks.objectives import open_objective
    from kit.train.checks.replicas import compare_replicas
    from kit.train.policy import build_policy
    from kit.train.schedule import learning_rate
    from kit.train.step import before_first_step, seed_everything, train_step

    interrupt.raise_on_ctrl_c()

    # --- check: every problem at once, before any weight is read
    checked = preflight.check(recipe, topology, request.recipe_name, launch=request.launch)
    recipe, data, total_steps = checked.recipe, checked.data, checked.total_steps
    if request.launch.dry_run:
        return show_dry_run(checked)
    if checked.is_finished():
        return

    # --- build: ranks, objective, model and optimiser, with the state of the last checkpoint
    run = Run(checked)  # joins the ranks, locks output_dir, and chooses the checkpoint
    objective = open_objective(run)  # distil with teacher_top_k: the teacher runs here, alone on the device
    policy = build_policy(run, recipe, checked.config, checked.tokenizer, data)  # sharded, proven, compiled
    objective.bind(policy, run)  # the reference or the teacher, with the weights from which the run starts
    run.begin(policy)  # loads the checkpoint, opens metrics.jsonl and trackers; from here on a signal saves and stops
    feed = objective.open_feed(policy, run)  # samples of the cache, a stream, or rollouts
    say(*policy.describe(recipe), *checked.notes, *feed.notes())

    # --- train: a step depends only on the seed and its number, not on the topology
    while True:
        step = run.state.step  # optimiser steps done
        if run.evaluation_is_due(step):  # eval_on_start, eval_steps, the last step; not once a stop is agreed
            run.enter(phases.EVALUATING, step)
            with run.stop.catching():  # a signal, or a failed metric, ends it on all ranks
                run.end_evaluation(evaluate(policy, objective, data, recipe, run.progress, lambda: run.stop.is_made))
        if run.save_is_due(step):  # save_steps, an epoch, a new best, the end of the loop
            run.save(policy, feed)
        if run.is_over(step):  # the last step, early stopping, an agreed stop
            break

        run.enter(feed.phase, step + 1)
        with run.stop.catching():  # a signal in a rollout, or a failed reward
            batch = feed.take(step)
        if run.stop.is_agreed:
            continue  # saves, and leaves the loop

        run.enter(phases.TRAINING, step + 1)
        before_first_step(policy, batch)  # DDP's buckets
        seed_everything(recipe.seed, step, policy.processes.index)
        rate = learning_rate(recipe, recipe.peak_learning_rate, step, total_steps)
        # forward, backward, clip, update: kit/train/step.py
        result = train_step(
            policy,
            objective,
            batch,
            rate,
            recipe.max_grad_norm,
            loss_scale=run.loss_scale,  # of fp16
            noise=neftune(recipe.neftune_noise_alpha, recipe.seed, step),
            asks_to_stop=run.wants_to_stop,  # this rank got a signal, or its save failed
            asks_to_save=run.saver.is_due,  # by time
            before_update=partial(compare_replicas, policy, recipe.check_replicas, step + 1),
        )
        run.end_step(batch, result, rate)  # counts, logs, agrees to stop; raises after max_nonfinite_steps

    # --- end: the final model; after a stop there is the checkpoint from which the same command continues
    run.saver.wait()
    if not run.stop.is_agreed:
        run.enter(phases.WRITING_FINAL)
        save_final(policy, checked, run.state)
    run.end(feed, write_report)  # run.json, the report, the upload; after a stop the exit status


if __name__ == "__main__":
    with exits.reporting_errors():
        main()
