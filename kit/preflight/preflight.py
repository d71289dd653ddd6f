"""All checks that can be made before any weight is read.

Promises: all problems are reported together; nothing is written except the tokenised data in the cache.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kit.config.launch_flags import Launch
from kit.config.optimisers import OPTIMISERS
from kit.config.recipe import Recipe
from kit.data.chat.shipped import fitting
from kit.data.chat.template import no_template
from kit.data.kinds.kinds import KINDS, kind_of
from kit.data.open import last_ids, open_data, stop_ids
from kit.data.samples.checks import holds_chats
from kit.data.samples.dataset import Dataset, open_datasets
from kit.data.samples.rows import NO_MEDIA
from kit.data.stream.stream import Stream
from kit.evaluate import try_metrics
from kit.hub.upload import check_upload
from kit.memory.fit import check_disk, memory_problems, plan_record, planned_workload, resolve_auto
from kit.model.build import (
    build_meta_model,
    check_model,
    fingerprint,
    num_positions,
    open_base_config,
    open_config,
)
from kit.model.layers.attention import describe_long_rows
from kit.model.layers.compile import why_not_compiled
from kit.model.layers.sequence_parallel import sequence_problems
from kit.model.media.codec import ModelMedia
from kit.model.media.open import open_media
from kit.model.pretrained.dequantise import describe_dequantised
from kit.model.pretrained.heads import pad_with, template_beside
from kit.model.pretrained.tokenizer import open_tokenizer
from kit.model.summary import aux_loss_coef
from kit.model.teacher import check_teacher, fingerprint_of_teachers, naming_teacher, own_teachers, teacher_settings
from kit.model.untrained import check_stop_tokens
from kit.preflight.rollout_checks import check_evaluation, check_references, check_server, try_rewards
from kit.preflight.tool_checks import check_tools, tool_schemas, try_environment
from kit.run.checked import Checked
from kit.run.folder import RunFolder
from kit.run.identity import identity
from kit.run.output_dir import run_in
from kit.strategy.accelerator import check_adapter_units, check_strategy, layer_classes
from kit.strategy.compiler import why_not_by_default
from kit.strategy.precision import check_fp8, describe_precision
from kit.strategy.topology import Topology
from kit.system.console import is_main, silence_libraries
from kit.system.errors import Problem, Problems, UserError, first_line, raise_if
from kit.tasks.objectives import objective_class


def check(
    recipe: Recipe,
    topology: Topology | None = None,
    recipe_name: str | None = None,
    launch: Launch | None = None,
) -> Checked:
    """Open and check the model's config, its shapes, the tokenizer, the data and the output folder.

    Args:
        topology: how the run will be distributed; None for a command that runs no model.
        recipe_name: the name of the recipe in ``run.json``; None for a command that trains nothing and has no folder.
        launch: with ``skip_memory_check``, a run that cannot fit its GPUs is no problem; with ``dry_run``, a model
            without weights is none.

    Raises:
        UserError: with all problems.
    """
    silence_libraries()
    launch = launch or Launch()
    if topology:  # alone, because other checks would fail at the same import
        raise_if(check_bitsandbytes(recipe))
    checked = Checked(recipe, topology, trains=recipe_name is not None)
    problems = Problems()
    datasets: list[Dataset] = []
    is_proposed = False  # then what is missing was reported, and the first rows are checked as if it were there
    with problems.caught():
        of_data = recipe.dataset_entries, recipe.eval_dataset_entries, recipe.streaming, KINDS[recipe.declared.rows]
        datasets = open_datasets(*of_data, scores=bool(topology) and not checked.trains, proposed=problems)
        is_proposed = bool(problems)
    with problems.caught():
        checked.tokenizer = open_tokenizer(recipe)
    if recipe.teacher and checked.trains and checked.tokenizer:
        with problems.caught():
            _check_teacher(checked, launch, problems)
    num_problems = len(problems)  # without those of the model and its adapters
    with problems.caught():
        _open_model(checked, datasets, launch, problems)
    if recipe.push_to_hub and checked.trains and is_main():
        with problems.caught():
            check_upload(recipe.push_to_hub, recipe.model_name_or_path, recipe.method != "full")
    if datasets and checked.tokenizer and checked.meta_model:
        fits = len(problems) == num_problems
        with problems.caught():
            is_proposed |= _propose_template(checked, datasets, problems)
            _open_data(checked, datasets, is_proposed)
            if not is_proposed:
                checked.total_steps = checked.data.total_steps(checked.recipe)
            if recipe_name is not None and fits:  # it needs a model and adapters that are right
                _find_stop_tokens(checked, datasets, problems)
    with problems.caught():
        _plan(checked, recipe_name, launch, problems)
    if checked.trains and (checked.data is None or is_proposed):
        with problems.caught():
            run_in(recipe.overwrite_output_dir, Path(recipe.output_dir or ""), recipe.inputs)
    problems.raise_if_any()
    if recipe.vllm_server_base_url and checked.trains and is_main() and not launch.dry_run:
        check_server(recipe)
    data, tokenizer = checked.data, checked.tokenizer
    tokenizer.chat_template = template_beside(recipe.declared.head, data.chat_template, data.text_form)
    checked.notes = [*data.notes, *checked.notes]
    return checked


def _check_teacher(checked: Checked, launch: Launch, problems: Problems) -> None:
    recipe, topology = checked.recipe, checked.topology
    assert topology is not None
    for own, _ in own_teachers(recipe):
        if own.teacher_server:
            continue
        config, teacher = check_teacher(own, checked.tokenizer, needs_weights=not launch.dry_run)
        problems += check_strategy(topology, teacher)
        sharing = topology.sequence_parallel_size
        refused = sequence_problems(sharing, teacher_settings(own), config, teacher, 0.0)
        problems += [replace(each, found=f"{each.found}, of the teacher") for each in refused]
        checked.teachers.append((own, config, teacher))
    checked.teacher_fingerprint = fingerprint_of_teachers(recipe)
    if checked.teachers and topology.strategy.name == "fsdp1":
        problems.append(Problem("teacher", "under FSDP1, which does not gather the lm_head", fix="--config fsdp"))


def _open_model(checked: Checked, datasets: Sequence[Dataset], launch: Launch, problems: Problems) -> None:
    """Open config and shapes, give ``auto`` its values, and check what runs the model."""
    num_problems, recipe, topology = len(problems), checked.recipe, checked.topology
    if "max_length" not in recipe.model_fields_set:
        longest = num_positions(open_base_config(recipe)) or recipe.max_length
        recipe = recipe.model_copy(update={"max_length": min(recipe.max_length, longest)})
    checked.recipe = recipe = objective_class(recipe).resolve(recipe, datasets)
    checked.config = config = open_config(recipe)
    checked.meta_model = meta_model = build_meta_model(recipe, config, recipe.packing)
    problems += check_model(
        recipe,
        config,
        meta_model,
        max_length=recipe.max_length,
        packing=recipe.packing,
        sequences_per_sample=recipe.declared.sequences_per_sample,
        router_aux_loss_coef=recipe.router_aux_loss_coef,
        needs_weights=not launch.dry_run,
    )
    if topology is None:
        return
    problems += check_strategy(topology, meta_model)
    router_loss = aux_loss_coef(meta_model, recipe.router_aux_loss_coef)
    problems += sequence_problems(topology.sequence_parallel_size, recipe, config, meta_model, router_loss)
    problems += check_fp8(recipe, topology)
    if len(problems) == num_problems:  # it needs adapters that fit
        problems += check_adapter_units(topology, recipe, meta_model)
    checked.notes += describe_precision(topology, launch.config)
    checked.notes += describe_dequantised(config, recipe.method)


def _propose_template(checked: Checked, datasets: Sequence[Dataset], problems: Problems) -> bool:
    """If the data need a chat template and there is none, report it, and go on with one that fits. Whether it did."""
    recipe, tokenizer = checked.recipe, checked.tokenizer
    if recipe.chat_template or tokenizer.chat_template or not any(map(holds_chats, datasets)):
        return False
    problems.append(no_template(tokenizer))
    checked.recipe = recipe.model_copy(update={"chat_template": next(iter(fitting(tokenizer)), None)})
    return True


def _open_data(checked: Checked, datasets: Sequence[Dataset], is_proposed: bool) -> None:
    """Tokenise the data, of which only the beginning is read if ``is_proposed``, and try metrics and rewards."""
    recipe, tokenizer = checked.recipe, checked.tokenizer
    media, no_media = _images(checked, recipe)
    checked.data = data = open_data(
        recipe.model_copy(update={"streaming": recipe.streaming or is_proposed}),
        datasets,
        tokenizer,
        checked.vocab_size,
        eval_settings=recipe,
        seed=recipe.seed,
        global_batch_size=recipe.global_batch_size // recipe.answers_per_prompt,
        kind=kind_of(recipe),
        rollout_steps=recipe.num_iterations if recipe.rolls_out and (checked.trains or not checked.topology) else 0,
        media=media,
        no_media=no_media,
        tools=tool_schemas(recipe),
    )
    if recipe.has_tools and not isinstance(data, Stream):  # of which only the beginning is read
        checked.stop_tokens, notes = check_tools(data, tokenizer, recipe.max_new_tokens)
        checked.notes += notes
    if recipe.declared.head != "lm" and not isinstance(data, Stream):
        pad_with(tokenizer, last_ids(data.train))
    if data.media:
        checked.notes.append(data.media.description)
    elif checked.trains and (named := {"vision", "audio", "projector"}.intersection(recipe.train_only or ())):
        found = f"{min(named)}, and no row has images or audio, so it would learn nothing"
        raise UserError("train_only", found, "language, or rows with images or audio", "leave it out")
    if data.evaluation is not None:
        check_evaluation(recipe, data.evaluation)
        try_metrics(recipe, data.evaluation, tokenizer, data.chat_template)
    if recipe.rewards and checked.trains and not isinstance(data, Stream) and is_main():
        check_references("--rewards", recipe.rewards, data.train)
        checked.notes += try_environment(recipe, data.train, tokenizer)
        checked.notes += try_rewards(recipe, data.train, tokenizer)


def _find_stop_tokens(checked: Checked, datasets: Sequence[Dataset], problems: Problems) -> None:
    """Find the tokens that end answers, and check that the model can learn them."""
    recipe, tokenizer = checked.recipe, checked.tokenizer
    if recipe.declared.head != "lm":
        return
    ids = sorted(stop_ids(checked.data, tokenizer))
    problems += check_stop_tokens(recipe, checked.meta_model, tokenizer, ids, f"{recipe.output_dir}/final")
    if any("text" not in dataset.fields for dataset in datasets):
        checked.stop_tokens |= dict(zip(tokenizer.convert_ids_to_tokens(ids), ids, strict=True))


def _open_folder(checked: Checked, recipe_name: str) -> RunFolder:
    recipe = checked.recipe
    found = identity(recipe, checked.data.fingerprint, fingerprint(recipe), checked.teacher_fingerprint)
    return RunFolder(recipe, recipe_name, found)


def _plan(checked: Checked, recipe_name: str | None, launch: Launch, problems: Problems) -> None:
    """Give ``auto`` its values, open the output folder, and check that the run fits into its GPUs and on its disk.

    The data have said how many steps there are.
    """
    recipe, topology, config, model = checked.recipe, checked.topology, checked.config, checked.meta_model
    if topology is None or model is None:
        return
    if checked.trains and recipe.torch_compile:
        by_default = recipe.torch_compile == "auto"
        why = by_default and why_not_by_default(recipe, topology, checked.total_steps)
        why = why or why_not_compiled(model, layer_classes(topology, model), recipe.packing, by_default)
        if by_default:
            checked.notes.append(f"torch_compile auto: {f'off ({why})' if why else 'on'}")
            recipe = recipe.model_copy(update={"torch_compile": not why and "auto"})
        elif why:
            problems.append(Problem("torch_compile", why, fix="--torch_compile false"))
    recipe, lines = resolve_auto(recipe, topology, config, checked.teacher_config)
    checked.recipe = recipe
    checked.notes += lines
    if not recipe.packing:  # packs are refused
        checked.notes += describe_long_rows(config, recipe.max_length, recipe.num_rows)
    workload = planned_workload(recipe, topology, config, checked.teacher_config) if checked.trains else None
    if workload:
        if workload.shape.tower:  # now it is known how large its images are; of a stream it is not
            longest, data = recipe.max_length if recipe.packing else None, checked.data
            of_media = 0 if data is None or isinstance(data, Stream) else data.train.image_tokens(longest)
            workload = replace(workload, image_tokens=of_media)
        problems += [] if launch.skip_memory_check else memory_problems(workload, topology)
        checked.plan = plan_record(workload, topology)
    checked.workload = workload
    if checked.total_steps and recipe_name is not None:
        checked.folder = folder = _open_folder(checked, recipe_name)
        if not (folder.finished_steps or launch.skip_memory_check):
            check_disk(recipe, topology, config, checked.total_steps)


def _images(checked: Checked, recipe: Recipe) -> tuple[ModelMedia | None, Problem]:
    """What makes pixels of images; or None, and the problem of a row that has one.

    Raises ``UserError`` if the recipe says how large images are, and there is nothing that makes any.
    """
    try:
        for is_asked, found, fix in (
            (
                any(own.teacher_server for own, _ in own_teachers(recipe)),
                "a served teacher",
                "leave out teacher_server",
            ),
            (recipe.has_tools, "tools", "leave out --tools and --environment"),
            (recipe.declared.head != "lm", f"--objective {recipe.objective}", "--objective sft or dpo"),
        ):
            if is_asked:
                raise UserError("images", f"not supported with {found} yet", fix=fix)
        media = open_media(recipe, recipe, checked.config, checked.meta_model, checked.tokenizer)
        with naming_teacher():
            for own, config, teacher in checked.teachers:
                its = open_media(teacher_settings(own), recipe, config, teacher, checked.tokenizer)
                if (its.key, config.model_type) != (media.key, checked.config.model_type):
                    found = f"{own.teacher} reads images or audio otherwise than the student"
                    raise UserError("teacher", found, "a model of its class with the same processor")
        return media, NO_MEDIA
    except UserError as error:
        if recipe.min_pixels or recipe.max_pixels:
            raise
        return None, error.problems[0]


def check_bitsandbytes(recipe: Recipe) -> list[Problem]:
    """Return a problem if the settings need bitsandbytes, and it is installed but cannot be imported."""
    if recipe.method == "qlora":
        key = "method"
    elif OPTIMISERS[recipe.optim].bitsandbytes:
        key = "optim"
    else:
        return []
    try:
        import bitsandbytes  # noqa: F401
    except Exception as error:  # a library of CUDA that is missing or of another version raises many types
        found = f"bitsandbytes is installed but broken ({first_line(error)})"
        return [Problem(key, found, fix="`python -m bitsandbytes` prints the cause; then reinstall it")]
    return []
