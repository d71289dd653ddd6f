"""Fine-tune a causal language model: full, LoRA or QLoRA, on one process, DDP or FSDP.

accelerate launch recipes/finetune.py                                    # the embedded tiny default, on anything
accelerate launch recipes/finetune.py --config fsdp                      # the same on FSDP
accelerate launch recipes/finetune.py --config single --recipe llama-8b-qlora --dataset my.jsonl
accelerate launch recipes/finetune.py --help                             # every flag, its unit and default
"""

import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this clone's kit, installed or not

from kit.config.command_line import read_command_line
from kit.config.recipe import DEFAULT_RECIPE, RECIPES
from kit.errors import Problems
from kit.failures import exits
from kit.strategy import launch

NEXT_COMMAND = "accelerate launch recipes/finetune.py --config single --recipe llama-8b-lora --dataset my.jsonl"


def main() -> None:
    """One run, top to bottom. Does not return from ``resolve`` where it has to start more processes."""
    request = read_command_line(sys.argv[1:])
    recipe, topology = launch.resolve(request)

    # Only now the heavy imports: a mistyped flag is answered before them.
    from kit.checkpoint import load as checkpoint
    from kit.checkpoint.save import Saver
    from kit.data import open as data
    from kit.data.feed.feed import Ranks
    from kit.evaluate import evaluate
    from kit.export import final as export
    from kit.failures import advice
    from kit.failures.ranks import Watch
    from kit.failures.signals import Stopped, StopRequest
    from kit.model import adapter
    from kit.model import load as model
    from kit.report import run_page as report
    from kit.run import folder as run
    from kit.run.log import Log, new_state, progress, silence_libraries
    from kit.strategy import accelerator as strategy
    from kit.train import replicas
    from kit.train.optim import build_optimizer
    from kit.train.schedule import learning_rate
    from kit.train.step import check_isolation, nonfinite, seed_everything, settle_strategy, train_step

    silence_libraries()
    # --- check: model config, tokenizer, data and output folder; every problem at once, before any weight is read
    output_dir = Path(recipe.output_dir or "")
    problems = Problems()
    sources = tokenizer = config = None
    with problems.caught():
        sources = data.open_sources(recipe)
    with problems.caught():
        tokenizer = model.open_tokenizer(recipe)
    with problems.caught():
        config = model.open_config(recipe)
        meta_model = model.build_meta_model(recipe, config)
        problems += model.check_model(recipe, config, meta_model)
        problems += strategy.check(topology, meta_model)
    if sources and tokenizer and config:
        with problems.caught():
            vocab_size = config.get_text_config().vocab_size
            datasets = data.open_data(recipe, sources, tokenizer, vocab_size)
            identity = run.identity(recipe, datasets.fingerprint, model.fingerprint(recipe, config))
            finished_steps = run.check_output_dir(recipe, identity)
            seen = run.snapshot(output_dir)
            wanted = run.wanted_checkpoint(recipe)
            resume_path = checkpoint.find_checkpoint(output_dir / "checkpoints", wanted, launch.say)
            if resume_path:
                run.check_checkpoint(resume_path, checkpoint.read_manifest(resume_path)["identity"], identity)
    problems.raise_if_any()
    tokenizer.chat_template = datasets.chat_template
    evaluation = datasets.evaluation
    total_steps = datasets.total_steps(recipe)
    if request.launch.dry_run:
        planned = strategy.planned(topology, adapter.attach_adapter(meta_model, recipe))
        notes = [*datasets.notes, *datasets.open_feed(recipe, Ranks(topology.num_processes), 0, {}).notes()]
        launch.say(strategy.describe(planned, recipe), *notes)
        launch.say(f"{total_steps} steps. Dry run: nothing written but the tokenised data in the cache.")
        return

    # What a checkpoint keeps of the loop; `log.state` makes the next one.
    state = checkpoint.read_state(resume_path, new_state()) if resume_path else new_state()
    if finished_steps == total_steps and wanted == "auto" and (output_dir / "final").is_dir():
        launch.say(
            f"this run is finished: {output_dir}/final",
            "to go on, raise max_steps; to start afresh, another --output_dir",
        )
        return
    run.check_start(recipe, finished_steps, state["step"], total_steps)

    # --- build: process group, weights, optimiser; sharded, and where the last checkpoint left them
    accelerator, load_plan = strategy.start(recipe, topology)
    watch = Watch(accelerator, strategy.open_store(), recipe.ddp_timeout)
    exits.explain_with(watch.explain)
    llm = optimizer = None  # the next line sees them as they are when something fails
    exits.explain_with(lambda error: advice.explain(error, llm, optimizer, recipe, topology))
    strategy.agree(accelerator, "dataset", f"{datasets.fingerprint}, {total_steps} steps")  # as seen on each machine
    strategy.agree(accelerator, "output_dir", str(resume_path))
    with strategy.together(accelerator):  # a mistake only one rank can see stops all of them
        if accelerator.is_main_process:
            launch.say(*run.open_output_dir(recipe, identity, seen))
    watch.at("loading the model")
    with strategy.together(accelerator):
        llm = model.build_model(recipe, config, load_plan)
    optimizer = build_optimizer(llm, recipe)
    llm, optimizer, actual = strategy.prepare(accelerator, topology, llm, optimizer)
    if recipe.packing:
        check_isolation(accelerator, llm, vocab_size)
    about = {"identity": identity, "strategy": actual, "versions": run.versions()}
    if resume_path:
        checkpoint.load_checkpoint(llm, optimizer, resume_path)
        launch.say(f"continuing after step {state['step']} of {total_steps} ({resume_path})")
        launch.say(*run.changes(checkpoint.read_manifest(resume_path), about))
    record = (output_dir, recipe, request.recipe_name, about, datasets.describe())
    if accelerator.is_main_process:
        # The steps after the one it continues from are run again: their checkpoints are of the past.
        checkpoint.drop_after(output_dir / "checkpoints", state["step"])
        run.write_run_file(*record)
    metrics_file = output_dir / "metrics.jsonl"
    saver = Saver(accelerator, recipe, output_dir / "checkpoints", about, metrics_file, watch.at_save)
    exits.finish_first(saver.finish)
    feed = datasets.open_feed(recipe, accelerator, data.pad_id(tokenizer), state["feed"])
    log = Log(accelerator, recipe, output_dir, state, total_steps, datasets.names)
    log.say(strategy.describe(actual, recipe), *datasets.notes, *feed.notes())
    log.say(*replicas.notes(accelerator, llm, recipe.check_replicas))

    # --- train: a step is a function of the seed and its number, whatever the topology
    schedule = (recipe.peak_learning_rate, recipe.warmup_steps, recipe.lr_scheduler_type)
    evaluation_is_due = partial(data.evaluation_is_due, recipe, total_steps)
    stop = StopRequest(accelerator)
    evaluate_now = partial(evaluate, accelerator, llm, recipe, tokenizer, stop.along(watch.along(progress)))

    def leave_stopped(done: int) -> NoReturn:
        """With what was saved after ``done`` steps."""
        saver.wait()
        if accelerator.is_main_process:
            run.write_run_file(*record, interrupted=done)
        log.close()
        saved = f"after step {done} of {total_steps}, and saved" if done else "before the first step"
        log.say(f"stopped by a signal {saved}: the same command continues")
        if accelerator.is_main_process:
            launch.say(report.tell(output_dir))
        accelerator.wait_for_everyone()  # a launcher ends all ranks when the first one leaves
        exits.leave(exits.STOPPED)

    first = state["step"]
    if evaluation and evaluation_is_due(first) and state["evaluated_step"] != first:  # or a signal came before its end
        watch.at("evaluating")
        try:
            log.evaluation(first, evaluate_now(evaluation))
        except Stopped:
            leave_stopped(first)
    for step in range(first, total_steps):
        done = step + 1
        last = done == total_steps
        watch.at("reading data", done)
        batch = feed.take(step)
        rate = learning_rate(step, total_steps, *schedule)

        watch.at("training", done)
        if step == first:
            settle_strategy(accelerator, llm, batch)
        seed_everything(recipe.seed, step, accelerator.process_index)
        check = recipe.check_replicas and done % recipe.check_replicas == 0
        before_update = partial(replicas.check_replicas, accelerator, llm, done) if check else None
        must_stop = stop.is_made or saver.has_failed  # the next save raises on all ranks what the last one failed of
        # forward, backward, clip, update: kit/train/step.py
        result = train_step(accelerator, llm, optimizer, batch, rate, recipe.max_grad_norm, must_stop, before_update)
        log.step(done, batch, result, rate)
        if log.nonfinite_steps > recipe.max_nonfinite_steps:
            raise nonfinite(done, result, batch)

        is_best, stopped = False, result.stop and not last
        if evaluation and evaluation_is_due(done) and not stopped:
            watch.at("evaluating", done)
            try:
                is_best = log.evaluation(done, evaluate_now(evaluation))
            except Stopped:
                stopped = True
        is_due = recipe.save_steps and done % recipe.save_steps == 0
        if last or stopped or is_due or (is_best and recipe.keep_best):
            watch.at("saving", done)
            saver.save(llm, optimizer, log.state(done, feed.state()), log.best_step)
        if stopped:
            leave_stopped(done)

    # --- leave: what from_pretrained opens
    watch.at("writing the final model")
    saver.wait()
    card = export.model_card(recipe, actual, log.last_evaluation, total_steps)
    export.save_final(accelerator, llm, tokenizer, output_dir / "final", card, config.dtype)
    if accelerator.is_main_process:
        run.write_run_file(*record, finished_steps=total_steps)
    log.close()
    log.say(*feed.closing_notes(), *log.summary(), f"model: {output_dir / 'final'}")
    if accelerator.is_main_process:
        launch.say(report.tell(output_dir))
    if RECIPES / DEFAULT_RECIPE in Path(recipe.datasets[0].path).parents:
        log.say("next, with a real model (`kit recipes` lists more):", f"    {NEXT_COMMAND}")


if __name__ == "__main__":
    with exits.reporting_errors():
        main()
