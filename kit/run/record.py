"""Read and write the records of a run: ``run.json`` and ``metrics.jsonl``."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from kit import __version__
from kit.checkpoint.manifest import ALL, verify
from kit.config.recipe import IDENTITY, Recipe
from kit.config.settings.data import DataSettings
from kit.config.settings.method import MethodSettings
from kit.config.settings.objective import ObjectiveSettings
from kit.model.pretrained.locate import check_base
from kit.strategy.topology import ActualStrategy
from kit.system import durable
from kit.system.cache import file_digest
from kit.system.durable import open_regular, read_small
from kit.system.errors import Problem, UserError, raise_if

RUN_FILE, METRICS_FILE = "run.json", "metrics.jsonl"
Opening = TypeVar("Opening", bound=MethodSettings)
MAX_STEP = 2**53  # a float holds each whole number up to it
# Settings of whoever opens the model, not of the run: they change how it is computed only.
_OF_WHO_OPENS = (
    "trust_remote_code",
    "attn_implementation",
    "experts_implementation",
    "gradient_checkpointing",
    "activation_offload",
)
_OF_TRAINING = {"streaming", "shuffle", "shuffle_buffer_size", "packing", "max_train_samples"}  # and of its data alone


def read_run(run_file: Path) -> tuple[Recipe, ActualStrategy]:
    """Read ``run.json``: the recipe of the run, and the strategy it really had.

    Raises:
        UserError: the file is absent, damaged, or not a record of a run.
    """
    with _opened(run_file) as values:
        return Recipe.model_validate(values["recipe"]), ActualStrategy.from_record(values["strategy"])


@contextmanager
def _opened(run_file: Path) -> Iterator[dict[str, Any]]:
    """Yield the values of ``run.json``. A missing key in the ``with`` block is a ``UserError``."""
    try:
        yield json.loads(read_small(run_file))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        found = f"no record of a run ({fault_of_record(error)})"
        raise UserError(str(run_file), found, "the folder of a run, or a file in it") from None


def fault_of_record(error: Exception) -> str:
    """Return what is wrong with ``run.json``, with its field where that is known."""
    if isinstance(error, KeyError):
        return f"no {error.args[0]!r}"
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return type(error).__name__


@dataclass(frozen=True)
class Texts:
    """The entries of ``run.json`` on the texts that a run trains on."""

    stop_tokens: dict[str, int]  # that end answers, with their ids
    form: str  # see ``kit.data.chat.tokens.FORMS``


def read_texts(run_file: Path | None) -> Texts:
    """Read these entries like ``read_run`` reads the rest; None: no run is known."""
    if run_file is None:
        return Texts({}, "chat")
    with _opened(run_file) as values:
        return Texts(values["data"]["stop_tokens"], values["data"]["text_form"])


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read a run's ``metrics.jsonl``; empty if there is none. A line that a kill cut off is left out."""
    return list(metrics_rows(folder))


def metrics_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of ``read_metrics``, one in memory at a time: a long run has millions."""
    with suppress(OSError), open_regular(folder / METRICS_FILE) as file:
        for line in file:
            if (row := metrics_row(line)) is not None:
                yield row


def metrics_row(line: bytes) -> dict[str, Any] | None:
    """Return a line of ``metrics.jsonl`` as a row; None for one that is damaged, as by a kill."""
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        if isinstance(row, dict) and type(row.get("step")) is int and 0 <= row["step"] <= MAX_STEP:
            return row
    return None


def is_evaluation(row: Mapping[str, Any]) -> bool:
    """Return whether a row is of an evaluation."""
    return any(key.startswith("eval_") for key in row)


def with_model_of_run(settings: Opening, run_file: Path, base: str | None = None) -> Opening:
    """Return ``settings`` with the model, the method and the adapters of a run: they open the model that it trained.

    Args:
        run_file: ``run.json`` of the run.
        base: the base model, if it is no longer where the run found it.

    Raises:
        UserError: ``run_file`` cannot be read, or the base cannot be opened.
    """
    run, _ = read_run(run_file)
    names = [name for name in MethodSettings.model_fields if name not in _OF_WHO_OPENS]
    settings = settings.model_copy(update={name: getattr(run, name) for name in names})
    if base:
        return settings.model_copy(update={"model_name_or_path": base, "model_revision": None})
    fix = "a relative path counts from where the run was started"
    check_base(str(run_file), settings.model_name_or_path, settings.model_revision, fix)
    return settings


def with_model_of_checkpoint(
    settings: Opening, path: Path, where: str, base: str | None = None, part: slice = ALL
) -> Opening:
    """Check a checkpoint, and call ``with_model_of_run`` for its run. The result opens the model for its weights.

    Args:
        path: the checkpoint, in the output folder of its run.
        where: the field that names the checkpoint, for messages.
        part: which of its files to hash, as ``verify`` takes it.

    Raises:
        UserError: the checkpoint is damaged, is not in the folder of its run, or the base cannot be opened.
    """
    raise_if(Problem(where, f"{path}: {fault}") for fault in verify(path, part))
    return with_model_of_run(settings, path.parent.parent / RUN_FILE, base)


def as_trained(settings: Recipe, run: Recipe) -> Recipe:
    """Return ``settings`` with those of a run that change its results: texts, lengths, images, losses, rounding.

    Explicit ``settings`` win: another objective with its own settings, another template with its own variables. The
    method is the run's if both train adapters. The user's code is never taken from the file of a run.
    """
    names = {*DataSettings.model_fields, "fp8", "qat", "qat_group_size"} & set(IDENTITY) - _OF_TRAINING
    own = {name for name in settings.model_fields_set if getattr(settings, name) is not None}
    if "chat_template" in own:
        names.remove("chat_template_kwargs")
    if "qat" in own:
        names -= {"qat_group_size", "fp8"}
    if "method" in own and settings.method == "qlora":
        names.remove("fp8")
    if settings.objective == run.objective or "objective" not in own:
        names |= set(ObjectiveSettings.model_fields)
    if "lora" in settings.method and "lora" in run.method:
        names.add("method")
    names |= {"max_new_tokens"} if settings.has_tools and run.rolls_out else set()
    names -= own | {key for key, code in run.code.items() if code}
    if "rewards" not in names or ("environment" in run.rewards and not settings.environment):
        names -= {"rewards", "reward_weights"}
    return settings.model_copy(update={name: getattr(run, name) for name in names})


VERSIONED_PACKAGES = (
    "torch",
    "accelerate",
    "transformers",
    "peft",
    "bitsandbytes",
    "datasets",
    "tokenizers",
    "safetensors",
)


def versions() -> dict[str, str | None]:
    """Return the versions of the kit and of the libraries that affect results; None for one not installed."""
    return {"kit": __version__, **{name: _version(name) for name in VERSIONED_PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def own_code(names: Iterable[str]) -> dict[str, str]:
    """Return the hash of each file of the user, by its path; ``names`` are of ``Recipe.code``."""
    paths = {name.rpartition(":")[0] for name in names}
    return {path: file_digest(Path(path).expanduser())[:12] for path in sorted(paths)}


def write_record(folder: Path, values: Mapping[str, Any]) -> None:
    """Write ``run.json`` atomically: after a crash it has the old content or the new content."""
    durable.write_text(folder / RUN_FILE, json.dumps(values, indent=1) + "\n")
