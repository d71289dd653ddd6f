"""Fine-tune a causal language model: full, LoRA or QLoRA, on one process, DDP or FSDP.

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

from dataclasses import replace
from functools import partial

from kit.config.command_line import read_command_line
from kit.config.commands import command_of
from kit.config.recipe import DEFAULT_RECIPE, PACKAGE, RECIPES
from kit.failures import exits
from kit.preflight.inputs import check_inputs
from kit.strategy.launch import launch
from kit.system.console import say

HAS_TOOLS = (PACKAGE / "tools").is_dir()  # a run needs none of them
NEXT_FLAGS = "--config single --recipe llama-8b-lora --dataset my.jsonl"


def main() -> None:
    """One run, from top to bottom. If no launcher started its processes, ``resolve`` replaces this one by torchrun."""
    request = read_command_line(sys.argv[1:])
    recipe, topology = launch.resolve(request, check=check_inputs)

    # The slow imports come here, so that a mistyped flag is reported before them.
    from kit.checkpoint.load import load_checkpoint
    from kit.checkpoint.save import Saver
    from kit.data.feed.feed import BatchSource
    from kit.data.open import pad_id
    from kit.evaluate import evaluate
    from kit.export.card import model_card
    from kit.export.final import save_final
    from kit.export.stop_tokens import new_stops
    from kit.failures import phases
    from kit.failures.guard import Guard
    from kit.failures.signals import CAUSES, StopRequest
    from kit.memory.shortage import explain
    from kit.model.build import build_model, build_teacher
    from kit.model.layers.compile import CompiledLayers
    from kit.model.layers.embedding_noise import EmbeddingNoise
    from kit.model.pretrained.classes import auto_class
    from kit.model.pretrained.dequantise import class_that_dequantises
    from kit.model.summary import describe_parts
    from kit.model.teacher import naming_teacher, teacher_settings
    from kit.preflight import preflight
    from kit.run.log import Log
    from kit.run.shared import check_shared
    from kit.strategy.accelerator import layer_classes, prepare, start
    from kit.strategy.processes.rendezvous import together
    from kit.strategy.weights import StartWeights
    from kit.tasks.distil.stored_teacher import StoredTeacher, store_teacher
    from kit.tasks.distil.teacher import Teacher
    from kit.tasks.objectives import build_objective
    from kit.train.checks.compilation import compile_first
    from kit.train.checks.head_proof import prove_head
    from kit.train.checks.isolation import check_isolation
    from kit.train.checks.replicas import compare_replicas, describe_check
    from kit.train.loop_state import EvaluationOutcome
    from kit.train.optim.optim import build_optimizer, keep_rate_factors
    from kit.train.precompute import add_references
    from kit.train.rollouts.rollouts import Rollouts
    from kit.train.schedule import evaluation_is_due, learning_rate, save_is_due
    from kit.train.step import nonfinite_error, rebuild_gradient_buckets, seed_everything, train_step

    interrupt.raise_on_ctrl_c()

    # --- check: every problem at once, before any weight is read
    checked = preflight.check(recipe, topology, request.recipe_name, launch=request.launch)
    recipe = checked.recipe
    config = checked.config
    tokenizer = checked.tokenizer
    data = checked.data
    folder = checked.folder
    total_steps = checked.total_steps
    if request.launch.dry_run:
        if HAS_TOOLS:
            from kit.tools.plan.dry_run import show_run

            show_run(checked, topology)
        else:
            say("Dry run: all checks passed. Without kit/tools there is nothing more to show.")
        return
    assert folder is not None
    state = folder.loop_state()
    if folder.is_finished(state.step, total_steps):
        return

    # --- build: process group, model and optimiser, sharded, with the state of the last checkpoint
    accelerator, load_plan = start(recipe, topology, checked.facts(topology))  # which all machines must share
    guard = Guard(accelerator, recipe.ddp_timeout, partial(explain, recipe=recipe, topology=topology))
    with together(accelerator):  # an error on one rank stops all ranks
        folder.open()
    check_shared(accelerator, folder.path)
    state = folder.resume(accelerator)  # of an earlier checkpoint, if the newest is damaged
    folder.check_continues(state.step, total_steps)  # as the checkpoint may be another one now

    def open_teacher() -> Teacher:
        with together(accelerator), naming_teacher():
            frozen = build_teacher(teacher_settings(recipe), checked.teacher_config, load_plan, recipe.packing)
        return Teacher(prepare(accelerator, topology, frozen))

    teacher: Teacher | StoredTeacher | None = None
    if recipe.teacher_top_k:  # alone on the device
        guard.enter(phases.TEACHER)
        teacher = store_teacher(
            open_teacher,
            accelerator,
            recipe,
            checked.teacher_config,
            data,
            total_steps,
            checked.vocab_size,
            pad_id(tokenizer),
            guard.progress,
        )
    guard.enter(phases.LOADING)
    with together(accelerator):
        model = build_model(
            recipe,
            config,
            load_plan,
            packing=recipe.packing,
            seed=recipe.seed,
            router_aux_loss_coef=recipe.router_aux_loss_coef,
            compiled=bool(recipe.torch_compile),
        )
    parts = describe_parts(model, recipe, recipe.router_aux_loss_coef)
    stops = new_stops(model, checked.stop_tokens)
    optimizer = build_optimizer(model, recipe, recipe.peak_learning_rate, recipe.seed)
    rates = keep_rate_factors(optimizer, recipe.peak_learning_rate)
    guard.set_model(model, optimizer)
    layers = CompiledLayers(model, layer_classes(topology, model)) if recipe.torch_compile else None
    prepared = prepare(accelerator, topology, model, optimizer)
    guard.set_model(prepared.model, prepared.optimizer)
    if recipe.packing:
        check_isolation(prepared, checked.vocab_size, data.encoder.pack_length, data.images)
    parts += prove_head(prepared, checked.vocab_size)
    if layers:
        compile_first(prepared, layers, recipe, recipe.num_rows)
    if recipe.teacher:
        teacher = teacher or open_teacher()
        parts.append(teacher.description)
    if recipe.precomputes_reference:  # with the weights from which the run begins
        guard.enter(phases.REFERENCE)
        add_references(
            prepared,
            recipe,
            data,
            total_steps,
            recipe.eval_batch_size,
            pad_id(tokenizer),
            guard.progress,
            seed=recipe.seed,
            compiled=bool(recipe.torch_compile),
        )
        guard.enter(phases.LOADING)
    if recipe.keeps_start:
        prepared = replace(prepared, start=StartWeights(prepared.model))
    if folder.checkpoint:
        load_checkpoint(prepared.model, prepared.optimizer, folder.checkpoint)
    folder.begin(prepared.strategy, checked.describe_data(), state.step, total_steps, data.skipped_rows(), checked.plan)
    log = Log(accelerator, recipe, folder.path, state, total_steps, data.dataset_names, checked.workload)
    saver = Saver(
        accelerator,
        recipe,
        folder.checkpoints,
        folder.about,
        synced_first=log.path,
        on_work=guard.enter_save,
        timeout_seconds=recipe.ddp_timeout,
    )
    exits.finish_first(saver.finish)
    stop = StopRequest(accelerator)
    progress = stop.interruptible(guard.progress)
    feed: BatchSource = (
        Rollouts(
            prepared, recipe, data, tokenizer, checked.stop_tokens.values(), state.feed, progress, lambda: stop.is_made
        )
        if recipe.rolls_out
        else data.open_feed(recipe, prepared.ranks, pad_id(tokenizer), state.feed, recipe.output_dir)
    )
    about = prepared.strategy.describe(recipe, recipe)
    say(about, *parts, *rates, *checked.notes, *feed.notes(), *describe_check(prepared, recipe.check_replicas))

    # --- train: a step depends only on the seed and its number, not on the topology
    objective = build_objective(recipe, data.dataset_names, teacher)

    def evaluate_if_due(done: int) -> EvaluationOutcome:
        """Evaluate after ``done`` steps, if the recipe says so."""
        if data.evaluation is None or not evaluation_is_due(recipe, data, total_steps, done):
            return EvaluationOutcome()
        guard.enter(phases.EVALUATING, done)
        try:
            evaluation = evaluate(
                prepared,
                recipe,
                recipe.eval_batch_size,
                tokenizer,
                data.evaluation,
                progress,
                objective,
                data.mismatched(data.evaluation),
                train_on=recipe.train_on,
                seed=recipe.seed,
            )
        except CAUSES as cause:
            stop.because(cause)
            return EvaluationOutcome(was_stopped=True)
        log.evaluation(done, evaluation)
        is_best = state.end_evaluation(done, evaluation.metrics, recipe.metric_for_best_model)
        return EvaluationOutcome(is_best=is_best)

    def save(weights_only: bool = False) -> None:
        guard.enter(phases.SAVING, state.step)
        state.feed = feed.state()
        saver.save(prepared.model, prepared.optimizer, state.record(), weights_only)

    first_step = state.step
    is_stopped = False  # by a signal
    is_saved = True  # whether a checkpoint has all steps so far
    if state.evaluated_step != first_step:  # eval_on_start, or a signal stopped the last step's evaluation
        is_stopped = evaluate_if_due(first_step).was_stopped
    for step in range(first_step, total_steps):
        if is_stopped or state.early_stop_reason(recipe, total_steps):
            break
        done = step + 1  # steps, when this one is done
        guard.enter(phases.ROLLING_OUT if recipe.rolls_out else phases.READING, done)
        try:
            batch = feed.take(step)
        except CAUSES as cause:  # of a rollout
            stop.because(cause)
            is_stopped = True
            if not is_saved:
                save()
            break
        guard.enter(phases.TRAINING, done)
        if step == first_step:
            rebuild_gradient_buckets(prepared, batch)
        seed_everything(recipe.seed, step, prepared.processes.index)
        alpha = recipe.neftune_noise_alpha
        noise = EmbeddingNoise(alpha, recipe.seed, step) if alpha else None
        rate = learning_rate(recipe, recipe.peak_learning_rate, step, total_steps)
        # forward, backward, clip, update: kit/train/step.py
        result = train_step(
            prepared,
            objective,
            batch,
            rate,
            recipe.max_grad_norm,
            noise=noise,
            # If the last save failed, stop: the save that follows raises the error on all ranks.
            stop=stop.is_made or saver.has_failed,
            save=saver.is_due,
            before_update=partial(compare_replicas, prepared, recipe.check_replicas, done),
        )
        loss_spike = state.end_step(done, result, 0 if recipe.rolls_out else recipe.loss_spike_ratio)
        log.step(batch, result, rate, loss_spike)
        if state.nonfinite_steps > recipe.max_nonfinite_steps:
            raise nonfinite_error(done, result, batch)

        is_stopped = result.stop and done < total_steps
        outcome = EvaluationOutcome()
        if not is_stopped:
            outcome = evaluate_if_due(done)
            is_stopped = outcome.was_stopped
        is_last = done == total_steps or bool(state.early_stop_reason(recipe, total_steps))
        keep_as_best = outcome.is_best and recipe.keep_best
        is_due = result.save or save_is_due(recipe, data, total_steps, done)
        is_saved = is_last or is_stopped or keep_as_best or is_due
        if is_saved:
            save(recipe.save_only_model and not is_stopped)  # weights alone, but a stopped run must be able to continue

    # --- end: write the final model; after a signal there is the checkpoint, from which the same command continues
    saver.wait()
    if not is_stopped:
        guard.enter(phases.WRITING_FINAL)
        opened_by = auto_class(config).__name__, class_that_dequantises(config)
        card = model_card(recipe, prepared.strategy, state, tokenizer, data.text_form, stops, *opened_by)
        pixels = recipe.min_pixels, recipe.max_pixels
        save_final(prepared, tokenizer, folder.final, card, config.dtype, stops, pixels)
    folder.end(state.step, is_stopped, state.early_stop_reason(recipe, total_steps))
    log.end(stop.reason if is_stopped else "", [*feed.closing_notes(), *(layers.closing_notes() if layers else [])])
    if HAS_TOOLS:
        from kit.tools.report.run_page import write_report_at_end

        write_report_at_end(folder.path)
    folder.push(is_stopped, wait=partial(guard.enter, phases.WRITING_FINAL))
    if is_stopped:
        accelerator.wait_for_everyone()  # a launcher ends all ranks when the first one leaves
        stop.leave()
    if RECIPES / DEFAULT_RECIPE in Path(recipe.dataset_entries[0].path).parents:
        say("next, with a real model (`kit recipes` lists more):", f"    {command_of('finetune.py')} {NEXT_FLAGS}")


if __name__ == "__main__":
    with exits.reporting_errors():
        main()
