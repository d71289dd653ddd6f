"""The recipe schema: one declaration per setting gives the YAML key, the flag, the default, help and validation.

``kit.config.settings`` declares them by subject, ``kit.config.launch_flags`` those that only the command line has.
"""

from typing import Any, get_args

from kit.config.dataset_entry import DatasetEntry
from kit.config.settings.data import DataSettings, entries_of
from kit.config.settings.evaluation import EvalSettings
from kit.config.settings.method import MethodSettings
from kit.config.settings.objective import ObjectiveSettings
from kit.config.settings.optimisation import OptimSettings
from kit.config.settings.output import OutputSettings
from kit.config.settings.process import ProcessSettings
from kit.schema.fields import is_identity
from kit.scoring.own_metric import OwnMetric, is_own

DEFAULT_RECIPE = "tiny"


# pydantic takes the fields of the last base first: model, method, data, ...
class Recipe(
    ProcessSettings, OutputSettings, EvalSettings, OptimSettings, ObjectiveSettings, DataSettings, MethodSettings
):
    """All settings of a run except its topology. Frozen; unknown keys are refused."""

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate after warm-up; the default depends on the objective and the method."""
        of_full, of_adapters = self.declared.learning_rates
        return self.learning_rate or (of_full if self.method == "full" else of_adapters)

    @property
    def precomputes_reference(self) -> bool:
        """Whether the reference model's log-probabilities are computed before the first step.

        They must be if its weights change: in full fine-tuning, and if a given adapter is trained further. New adapters
        can be switched off in each step instead.
        """
        weights_change = self.method == "full" or bool(self.adapter_name_or_path)
        return self.declared.has_reference and (self.precompute_reference or weights_change)

    @property
    def keeps_initial_weights(self) -> bool:
        """Whether the KL penalty needs the initial weights in host memory, because the model's own are trained."""
        return (
            self.declared.rolls_out and bool(self.beta) and (self.method == "full" or bool(self.adapter_name_or_path))
        )

    @property
    def num_rows(self) -> int:
        """The number of rows of a micro-batch: a pack is one, and else each sequence of a sample."""
        return self.micro_batch_size * (1 if self.packing else self.declared.sequences_per_sample)

    @property
    def inputs(self) -> list[tuple[str, str]]:
        """What a run reads, which may be paths: the setting that names each, and its value."""
        keys = ("model_name_or_path", "adapter_name_or_path", "teacher", "chat_template", "resume_from_checkpoint")
        found = [(key, getattr(self, key)) for key in keys if getattr(self, key)]
        found += [("dataset", entry.path) for entry in self.dataset_entries]
        return found + [("eval_dataset", entry.path) for entry in self.eval_dataset_entries]

    @property
    def code(self) -> dict[str, list[str]]:
        """The user's code, ``FILE.py:NAME``, by the setting that names it."""
        given = {key: getattr(self, key) or [] for key in CODE}
        named = {key: [value] if isinstance(value, str) else value for key, value in given.items()}
        return {key: [name for name in names if is_own(name)] for key, names in named.items()}

    @property
    def eval_batch_size(self) -> int:
        """The number of samples in a micro-batch of an evaluation."""
        return self.per_device_eval_batch_size or self.micro_batch_size

    @property
    def eval_dataset_entries(self) -> list[DatasetEntry]:
        """The datasets of ``eval_dataset``; empty if it is not set."""
        entries = entries_of(
            self.eval_dataset or [], self.dataset_config, self.eval_dataset_split, self.dataset_columns, None
        )
        revisions = {entry.path.partition(":")[0]: entry.revision for entry in self.dataset_entries}
        return [
            entry.model_copy(update={"revision": entry.revision or revisions.get(entry.path.partition(":")[0])})
            for entry in entries
        ]


def _may_be_code(hint: Any) -> bool:
    return bool(hint == OwnMetric) or any(map(_may_be_code, get_args(hint)))


# The settings that may name code of the user, which only the command line may: their type has ``OwnMetric``.
CODE = [name for name, info in Recipe.model_fields.items() if _may_be_code(info.annotation)]
# The settings that identify a run: if one of them changes, it is another run. All others may change between two starts
# of a run: output, logging, evaluation, micro-batch size, topology, and the number of steps.
IDENTITY = [name for name, info in Recipe.model_fields.items() if is_identity(info)]
