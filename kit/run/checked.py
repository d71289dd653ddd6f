"""The result of preflight: everything that a run needs before it loads weights."""

from dataclasses import dataclass, field
from typing import Any

from kit.checkpoint.manifest import digest_of, read_manifest
from kit.config.recipe import Recipe
from kit.data.feed.data import Data
from kit.memory.workload import Workload
from kit.model.adapters.token_rows import num_rows
from kit.model.build import fingerprint, folder_fingerprint
from kit.model.pretrained.locate import open_adapter
from kit.run.facts import OWN_OF_MACHINE, compared_facts
from kit.run.folder import RunFolder
from kit.run.record import own_code
from kit.strategy.processes.agreement import Fact
from kit.strategy.topology import Topology


@dataclass
class Checked:
    """The result of preflight: everything that a run needs before it loads weights.

    Attributes:
        recipe: with a value for each setting that was ``auto``.
        topology: how the run will be distributed; None for a command that runs no model.
        trains: whether it is a run, with an output folder.
        config: the model's.
        meta_model: the model on the meta device: modules and shapes, no weights.
        tokenizer: with the chat template that is saved with the model.
        notes: lines for the user, from the data and from the checks.
        stop_tokens: those that end answers, with their ids; only of a run, and empty if all data are plain text.
        folder: None for a command without an output folder.
        total_steps: optimiser steps of the whole run.
        workload: None if there is no topology, or the formulas do not describe the run.
        plan: the entry of ``run.json``; empty if there is no topology, or nothing is planned.
        teachers: those that run here: of each the recipe with it, its config, and its modules on meta.
        teacher_fingerprint: see ``kit.model.teacher.fingerprint_of_teachers``.
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
    teachers: list[tuple[Recipe, Any, Any]] = field(default_factory=list)
    teacher_fingerprint: str | None = None

    @property
    def teacher_config(self) -> Any:
        """The config of the largest teacher that runs here; None: none does."""
        return max(self.teachers, key=lambda each: each[2].num_parameters(), default=(None, None))[1]

    @property
    def vocab_size(self) -> int:
        """The number of rows of the model's embedding."""
        return num_rows(self.meta_model)

    def is_finished(self) -> bool:
        """Whether the run in the folder is finished: ``RunFolder.is_finished``, which says so, and raises."""
        assert self.folder is not None
        return self.folder.is_finished(self.folder.loop_state().step, self.total_steps)

    def describe_data(self) -> dict[str, Any]:
        """Return the entry ``data`` for ``run.json``."""
        return {**self.data.describe(), "stop_tokens": self.stop_tokens, "text_form": self.data.text_form}

    def facts(self) -> list[Fact]:
        """Return the facts that all ranks compare before they load weights; none for a single process."""
        recipe, data, topology = self.recipe, self.data, self.topology
        if topology is None or topology.num_processes == 1:
            return []
        content: dict[str, Any] = {"model_name_or_path": fingerprint(recipe), "dataset": data.fingerprint}
        content["eval_dataset"] = data.evaluation and data.evaluation.fingerprint
        content["chat_template"] = str(data.chat_template)
        for key, names in recipe.code.items():
            content[key] = [*names, *own_code(names).values()]
        if self.teacher_fingerprint:
            content["teacher"] = self.teacher_fingerprint
        if recipe.adapter_name_or_path:
            adapter = open_adapter(recipe.adapter_name_or_path)
            content["adapter_name_or_path"] = folder_fingerprint(adapter, "adapter_config.json")
        if self.folder:
            path = self.folder.checkpoint
            content["resume_from_checkpoint"] = path and f"{path.name} {digest_of(read_manifest(path))}"
        settings = recipe.model_dump(mode="json", exclude=OWN_OF_MACHINE)
        return compared_facts(settings | {"learning_rate": recipe.peak_learning_rate}, topology, content)
