"""All checks that can be made before any weight is read.

Promises: all problems are reported together; nothing is written except the tokenised data in the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kit.checkpoint.manifest import digest_of, read_manifest
from kit.config.launch_flags import Launch
from kit.config.optimisers import OPTIMISERS
from kit.config.recipe import Recipe
from kit.data.chat.shipped import fitting
from kit.data.chat.template import no_template
from kit.data.feed.data import Data
from kit.data.kinds.kinds import KINDS, kind_of
from kit.data.open import last_ids, open_data, stop_ids
from kit.data.samples.checks import holds_chats
from kit.data.samples.dataset import Dataset, open_datasets
from kit.data.samples.rows import NO_IMAGES
from kit.data.stream.stream import Stream
from kit.evaluate import try_metrics
from kit.hub.upload import check_upload
from kit.memory.fit import check_disk, memory_problems, plan_record, planned_workload, resolve_auto
from kit.memory.workload import Workload
from kit.model.adapters.token_rows import num_rows
from kit.model.build import (
    build_meta_model,
    check_model,
    fingerprint,
    folder_fingerprint,
    num_positions,
    open_base_config,
    open_config,
)
from kit.model.images import Images, open_images
from kit.model.layers.attention import describe_long_rows
from kit.model.layers.compile import check_compile
from kit.model.layers.sequence_parallel import sequence_problems
from kit.model.pretrained.dequantise import describe_dequantised
from kit.model.pretrained.heads import pad_with, template_beside
from kit.model.pretrained.locate import open_adapter
from kit.model.pretrained.tokenizer import open_tokenizer
from kit.model.summary import aux_loss_coef
from kit.model.teacher import check_teacher, teacher_settings
from kit.model.untrained import check_stop_tokens
from kit.preflight.rollout_checks import check_server, try_rewards
from kit.run.facts import OWN_OF_MACHINE, compared_facts
from kit.run.folder import RunFolder
from kit.run.identity import identity
from kit.run.optional_tools import show_dry_run
from kit.run.output_dir import run_in
from kit.run.record import own_code
from kit.strategy.accelerator import check_adapter_units, check_strategy, layer_classes
from kit.strategy.precision import check_fp8_products, describe_precision
from kit.strategy.processes.agreement import Fact
from kit.strategy.topology import Topology, check_router_loss
from kit.system.console import is_main, silence_libraries
from kit.system.errors import Problem, Problems, UserError, first_line, raise_if
from kit.tasks.objectives import objective_class


@dataclass
class Preflight:
    """What the checks opened: everything that a run needs before it loads weights.

    Attributes:
        recipe: with a value for each setting that was ``auto``.
        topology: how the run will be distributed; None for a command that runs no model.
        trains: whether it is a run, with an output folder.
        config: the model's.
        meta_model: the model on the meta device: modules and shapes, no weights.
        tokenizer: with the chat template that is saved with the model.
        notes: lines for the user: those of the data, and what the checks found besides.
        stop_tokens: those that end answers, with their ids; of a run only, and none if all data are plain text.
        folder: None for a command without an output folder.
        total_steps: optimiser steps of the whole run.
        workload: None if there is no topology, or the formulas do not describe the run.
        plan: the entry of ``run.json``; empty if there is no topology, or nothing is planned.
        teacher_config: of a run with a teacher.
    """

    recipe: Recipe
    topology: Topology | None
    trains: bool
    config: Any = None
    meta_model: Any = None
    tokenizer: Any = None
    data: Data = None  # type: ignore[assignment]  # until it is opened
    notes: list[str] = field(default_factory=list)
    stop_tokens: dict[str, int] = field(default_factory=dict)
    folder: RunFolder | None = None
    total_steps: int = 0
    workload: Workload | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    teacher_config: Any = None

    @property
    def vocab_size(self) -> int:
        """The number of rows of the model's embedding."""
        return num_rows(self.meta_model)

    def show(self) -> None:
        """Print what the run would do, for ``--dry_run``. Raises ``UserError`` if it cannot continue in its folder."""
        show_dry_run(self)

    def is_finished(self) -> bool:
        """Whether the run in the folder is finished: ``RunFolder.is_finished``, which says so, and raises."""
        assert self.folder is not None
        return self.folder.is_finished(self.folder.loop_state().step, self.total_steps)

    def describe_data(self) -> dict[str, Any]:
        """Return the entry ``data`` for ``run.json``."""
        return {**self.data.describe(), "stop_tokens": self.stop_tokens, "text_form": self.data.text_form}

    def facts(self) -> list[Fact]:
        """Return what the ranks of all machines compare before they load weights; nothing for a single process."""
        recipe, data, topology = self.recipe, self.data, self.topology
        if topology is None or topology.num_processes == 1:
            return []
        content: dict[str, Any] = {"model_name_or_path": fingerprint(recipe), "dataset": data.fingerprint}
        content["eval_dataset"] = data.evaluation and data.evaluation.fingerprint
        content["chat_template"] = str(data.chat_template)
        for key, names in (("metrics", recipe.metrics), ("rewards", recipe.rewards)):
            content[key] = [*names, *own_code(names).values()]
        if recipe.teacher:
            content["teacher"] = fingerprint(teacher_settings(recipe))
        if recipe.adapter_name_or_path:
            adapter = open_adapter(recipe.adapter_name_or_path)
            content["adapter_name_or_path"] = folder_fingerprint(adapter, "adapter_config.json")
        if self.folder:
            path = self.folder.checkpoint
            content["resume_from_checkpoint"] = path and f"{path.name} {digest_of(read_manifest(path))}"
        settings = recipe.model_dump(mode="json", exclude=OWN_OF_MACHINE)
        return compared_facts(settings | {"learning_rate": recipe.peak_learning_rate}, topology, content)


def check(
    recipe: Recipe,
    topology: Topology | None = None,
    recipe_name: str | None = None,
    launch: Launch | None = None,
) -> Preflight:
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
        raise_if(check_bitsandbytes(recipe.method, recipe.optim))
    checked = Preflight(recipe, topology, trains=recipe_name is not None)
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
            if recipe_name is not None:
                if fits:  # it needs a model and adapters that are right
                    _find_stop_tokens(checked, datasets, problems)
                if not is_proposed:
                    checked.folder = _open_folder(checked, recipe_name)
    with problems.caught():
        _check_room(checked, launch, problems)
    if checked.trains and (checked.data is None or is_proposed):
        with problems.caught():
            run_in(recipe.overwrite_output_dir, Path(recipe.output_dir or ""), recipe.inputs)
    problems.raise_if_any()
    if recipe.vllm_server_base_url and checked.trains and is_main() and not launch.dry_run:
        check_server(recipe)
    data, tokenizer = checked.data, checked.tokenizer
    tokenizer.chat_template = template_beside(recipe.declared.head, data.chat_template, data.text_form)
    checked.total_steps = data.total_steps(checked.recipe)
    checked.notes = [*data.notes, *checked.notes]
    return checked


def _check_teacher(checked: Preflight, launch: Launch, problems: Problems) -> None:
    recipe, topology = checked.recipe, checked.topology
    assert topology is not None
    checked.teacher_config, teacher = check_teacher(recipe, checked.tokenizer, needs_weights=not launch.dry_run)
    problems += check_strategy(topology, teacher)
    settings, sharing = teacher_settings(recipe), topology.sequence_parallel_size
    refused = sequence_problems(sharing, settings, checked.teacher_config, teacher, 0.0)
    problems += [replace(each, found=f"{each.found}, of the teacher") for each in refused]
    if topology.strategy.name == "fsdp1":
        problems.append(Problem("teacher", "under FSDP1, which gives no head as a whole", fix="--config fsdp"))


def _open_model(checked: Preflight, datasets: Sequence[Dataset], launch: Launch, problems: Problems) -> None:
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
    recipe, lines = resolve_auto(recipe, topology, config, checked.teacher_config)
    checked.recipe = recipe
    checked.notes += lines
    if checked.trains:
        checked.workload = planned_workload(recipe, topology, config, checked.teacher_config)
    problems += check_strategy(topology, meta_model)
    router_loss = aux_loss_coef(meta_model, recipe.router_aux_loss_coef)
    problems += sequence_problems(topology.sequence_parallel_size, recipe, config, meta_model, router_loss)
    problems += check_fp8_products(recipe, topology)
    if recipe.torch_compile:
        problems += check_compile(meta_model, layer_classes(topology, meta_model), recipe.packing)
    if len(problems) == num_problems:  # it needs adapters that fit
        problems += check_adapter_units(topology, recipe, meta_model)
    checked.notes += describe_precision(topology, launch.config)
    checked.notes += describe_dequantised(config)
    if not recipe.packing:  # packs are refused
        checked.notes += describe_long_rows(config, recipe.max_length, recipe.num_rows)
    problems += check_router_loss(topology, router_loss)


def _propose_template(checked: Preflight, datasets: Sequence[Dataset], problems: Problems) -> bool:
    """If the data need a chat template and there is none, report it, and go on with one that fits. Whether it did."""
    recipe, tokenizer = checked.recipe, checked.tokenizer
    if recipe.chat_template or tokenizer.chat_template or not any(map(holds_chats, datasets)):
        return False
    problems.append(no_template(tokenizer))
    checked.recipe = recipe.model_copy(update={"chat_template": next(iter(fitting(tokenizer)), None)})
    return True


def _open_data(checked: Preflight, datasets: Sequence[Dataset], is_proposed: bool) -> None:
    """Tokenise the data, of which only the beginning is read if ``is_proposed``, and try metrics and rewards."""
    recipe, tokenizer = checked.recipe, checked.tokenizer
    images, no_images = _images(recipe, checked.config, checked.meta_model, tokenizer)
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
        images=images,
        no_images=no_images,
    )
    if recipe.declared.head != "words" and not isinstance(data, Stream):
        pad_with(tokenizer, last_ids(data.train))
    if data.images:
        checked.notes.append(data.images.description)
    if data.evaluation is not None:
        try_metrics(recipe, data.evaluation, tokenizer)
    if recipe.rewards and checked.trains and not isinstance(data, Stream) and is_main():
        checked.notes += try_rewards(recipe, data.train, tokenizer)


def _find_stop_tokens(checked: Preflight, datasets: Sequence[Dataset], problems: Problems) -> None:
    """Find the tokens that end answers, and check that the model can learn them."""
    recipe, tokenizer = checked.recipe, checked.tokenizer
    if recipe.declared.head != "words":
        return
    ids = sorted(stop_ids(checked.data, tokenizer))
    problems += check_stop_tokens(recipe, checked.meta_model, tokenizer, ids, f"{recipe.output_dir}/final")
    if any("text" not in dataset.fields for dataset in datasets):
        checked.stop_tokens = dict(zip(tokenizer.convert_ids_to_tokens(ids), ids, strict=True))


def _open_folder(checked: Preflight, recipe_name: str) -> RunFolder:
    recipe = checked.recipe
    of_teacher = fingerprint(teacher_settings(recipe)) if checked.teacher_config else None
    return RunFolder(recipe, recipe_name, identity(recipe, checked.data.fingerprint, fingerprint(recipe), of_teacher))


def _check_room(checked: Preflight, launch: Launch, problems: Problems) -> None:
    """Check that the run fits into its GPUs and on its disk."""
    recipe, topology, data, folder = checked.recipe, checked.topology, checked.data, checked.folder
    if topology is None:
        return
    if workload := checked.workload:
        if workload.shape.tower:  # now it is known how large its images are; of a stream it is not
            longest = recipe.max_length if recipe.packing else None
            of_images = 0 if isinstance(data, Stream) else data.train.image_tokens(longest)
            checked.workload = workload = replace(workload, image_tokens=of_images)
        problems += [] if launch.skip_memory_check else memory_problems(workload, topology)
        checked.plan = plan_record(workload, topology)
    if folder and not (folder.finished_steps or launch.skip_memory_check):
        check_disk(recipe, topology, checked.config, data.total_steps(recipe))


def _images(recipe: Recipe, config: Any, meta_model: Any, tokenizer: Any) -> tuple[Images | None, Problem]:
    """What makes pixels of images; or None, and the problem of a row that has one.

    Raises ``UserError`` if the recipe says how large images are, and there is nothing that makes any.
    """
    try:
        for is_asked, found, fix in (
            (bool(recipe.vllm_server_base_url), "a vLLM server", "leave out --vllm_server_base_url"),
            (bool(recipe.teacher), "a teacher", "--objective sft or dpo"),
            (recipe.declared.head != "words", f"--objective {recipe.objective}", "--objective sft or dpo"),
        ):
            if is_asked:
                raise UserError("images", f"given, and {found} was not shown with images", fix=fix)
        return open_images(recipe, recipe, config, meta_model, tokenizer), NO_IMAGES
    except UserError as error:
        if recipe.min_pixels or recipe.max_pixels:
            raise
        return None, error.problems[0]


def check_bitsandbytes(method: str, optim: str) -> list[Problem]:
    """Return a problem if the settings need bitsandbytes, and it is installed but cannot be imported."""
    if method == "qlora":
        key = "method"
    elif OPTIMISERS[optim].bitsandbytes:
        key = "optim"
    else:
        return []
    try:
        import bitsandbytes  # noqa: F401
    except Exception as error:  # a library of CUDA that is missing or of another version raises many types
        found = f"bitsandbytes is installed but broken ({first_line(error)})"
        return [Problem(key, found, fix="`python -m bitsandbytes` says what it misses; then install it again")]
    return []
