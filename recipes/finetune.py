"""Fine-tune a causal language model: full, LoRA or QLoRA, on one process, DDP or FSDP.

accelerate launch recipes/finetune.py                                    # the embedded tiny default, on anything
accelerate launch recipes/finetune.py --config fsdp                      # the same on FSDP
accelerate launch recipes/finetune.py --config single --recipe llama-8b-qlora --dataset my.jsonl
accelerate launch recipes/finetune.py --help                             # every flag, its unit and default
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this clone's kit, installed or not

from kit.config.command_line import read_command_line
from kit.config.recipe import DEFAULT_RECIPE, RECIPES
from kit.console import say
from kit.failures import exits
from kit.strategy import launch

HAS_TOOLS = (RECIPES.parent / "kit/tools").is_dir()  # a run needs none of them
NEXT_COMMAND = "accelerate launch recipes/finetune.py --config single --recipe llama-8b-lora --dataset my.jsonl"


def main() -> None:
    """One run, from top to bottom. If it needs more processes, ``resolve`` replaces this one by torchrun."""
    request = read_command_line(sys.argv[1:])
    recipe, topology = launch.resolve(request)

    # The slow imports come here, so that a mistyped flag is reported before them.
    from kit import phases, preflight
    from kit.checkpoint.load import load_checkpoint
    from kit.checkpoint.save import Saver
    from kit.data.open import pad_id
    from kit.evaluate import evaluate
    from kit.export.final import model_card, save_final
    from kit.export.stops import new_stops
    from kit.failures.guard import Guard
    from kit.failures.signals import Stopped, StopRequest
    from kit.model.load import build_model
    from kit.model.parts import describe_parts
    from kit.run.log import Log
    from kit.run.shared import check_shared
    from kit.strategy.accelerator import prepare, start
    from kit.strategy.rendezvous import together
    from kit.train.isolation import check_isolation
    from kit.train.objective import SupervisedLoss
    from kit.train.optim import build_optimizer
    from kit.train.replicas import ReplicaCheck
    from kit.train.schedule import evaluation_is_due, learning_rate, save_is_due
    from kit.train.step import nonfinite, seed_everything, settle_strategy, train_step

    # --- check: every problem at once, before any weight is read
    checked = preflight.check(recipe, topology, request.recipe_name, launch=request.launch)
    recipe, config, tokenizer = checked.recipe, checked.config, checked.tokenizer
    data, folder, total_steps = checked.data, checked.folder, checked.total_steps
    if request.launch.dry_run:
        if HAS_TOOLS:
            from kit.tools.plan.dry_run import show_run

            show_run(checked, topology)
        return
    assert folder is not None
    state = folder.loop_state()
    if folder.is_finished(state.step, total_steps):
        return

    # --- build: process group, model and optimiser, sharded, with the state of the last checkpoint
    accelerator, load_plan = start(recipe, topology, checked.facts(topology))  # which all machines must share
    guard = Guard(accelerator, recipe, topology)
    with together(accelerator):  # an error on one rank stops all ranks
        folder.open()
    check_shared(accelerator, folder.path)
    state = folder.resume(accelerator, total_steps)  # of an earlier checkpoint, if the newest is damaged
    guard.at(phases.LOADING)
    with together(accelerator):
        model = build_model(
            recipe,
            config,
            load_plan,
            packing=recipe.packing,
            seed=recipe.seed,
            router_aux_loss_coef=recipe.router_aux_loss_coef,
        )
    parts, stops = describe_parts(model, recipe, recipe.router_aux_loss_coef), new_stops(model, checked.stop_tokens)
    optimizer = build_optimizer(model, recipe)
    guard.set_model(model, optimizer)
    prepared = prepare(accelerator, topology, model, optimizer)
    guard.set_model(prepared.model, prepared.optimizer)
    if recipe.packing:
        check_isolation(prepared, checked.vocab_size)
    if folder.checkpoint:
        load_checkpoint(prepared.model, prepared.optimizer, folder.checkpoint)
    folder.begin(prepared.strategy, checked.describe_data(), state.step, total_steps, data.skipped_rows(), checked.plan)
    log = Log(accelerator, recipe, folder.path, state, total_steps, data.names)
    saver = Saver(accelerator, recipe, folder.checkpoints, folder.about, log.path, guard.watch.at_save)
    exits.finish_first(saver.finish)
    feed = data.open_feed(recipe, prepared.ranks, pad_id(tokenizer), state.feed)
    check_replicas = ReplicaCheck(prepared, every=recipe.check_replicas)
    say(prepared.strategy.describe(recipe), *parts, *checked.notes, *feed.notes(), *check_replicas.notes())

    # --- train: a step depends only on the seed and its number, not on the topology
    objective = SupervisedLoss(data.names)
    stop = StopRequest(accelerator)

    def evaluate_after(done: int) -> bool | None:
        """Evaluate if it is due. Returns whether the loss is the lowest so far; None if a signal stopped it."""
        if data.evaluation is None or not evaluation_is_due(recipe, data, total_steps, done):
            return False
        guard.at(phases.EVALUATING, done)
        try:
            evaluation = evaluate(prepared, recipe, tokenizer, data.evaluation, stop.interruptible(guard.progress))
        except Stopped:
            return None
        log.evaluation(done, evaluation)
        return state.end_evaluation(done, evaluation.metrics, recipe.early_stopping_threshold)

    first = state.step
    # Also after a resume: a signal may have stopped the evaluation of the last step.
    stopped = state.evaluated_step != first and evaluate_after(first) is None
    for step in range(first, first if stopped or state.why_early(recipe) else total_steps):
        done = step + 1
        guard.at(phases.READING, done)
        batch = feed.take(step)
        guard.at(phases.TRAINING, done)
        if step == first:
            settle_strategy(prepared, batch)
        seed_everything(recipe.seed, step, prepared.ranks.index)
        rate = learning_rate(recipe, step, total_steps)
        # If the last save failed, stop: the save that follows raises the error on all ranks.
        must_stop, check = stop.is_made or saver.has_failed, partial(check_replicas, done)
        # forward, backward, clip, update: kit/train/step.py
        result = train_step(prepared, objective, batch, rate, recipe.max_grad_norm, stop=must_stop, before_update=check)
        log.step(batch, result, rate, state.end_step(done, result, recipe.loss_spike_ratio))
        if state.nonfinite_steps > recipe.max_nonfinite_steps:
            raise nonfinite(done, result, batch)

        last = done == total_steps
        stopped = result.stop and not last
        is_best = False if stopped else evaluate_after(done)
        stopped = stopped or is_best is None
        last = last or bool(state.why_early(recipe))
        if last or stopped or save_is_due(recipe, data, done) or (is_best and recipe.keep_best):
            guard.at(phases.SAVING, done)
            state.feed = feed.state()
            weights_only = recipe.save_only_model and not stopped  # a stopped run shall continue
            saver.save(prepared.model, prepared.optimizer, state.record(), weights_only)
        if last or stopped:
            break

    # --- end: write the final model; after a signal there is the checkpoint, from which the same command continues
    saver.wait()
    if not stopped:
        guard.at(phases.WRITING_FINAL)
        card = model_card(recipe, prepared.strategy, state.last_evaluation, state.step, stops)
        save_final(prepared, tokenizer, folder.final, card, config.dtype, stops)
    folder.end(state.step, stopped, state.why_early(recipe))
    log.end(stopped, feed.closing_notes())
    if HAS_TOOLS:
        from kit.tools.report.run_page import write_report_at_end

        write_report_at_end(folder.path)
    if stopped:
        accelerator.wait_for_everyone()  # a launcher ends all ranks when the first one leaves
        exits.leave(exits.STOPPED)
    if RECIPES / DEFAULT_RECIPE in Path(recipe.datasets[0].path).parents:
        say("next, with a real model (`kit recipes` lists more):", f"    {NEXT_COMMAND}")


if __name__ == "__main__":
    with exits.reporting_errors():
        main()
