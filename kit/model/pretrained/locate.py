"""Find a model or an adapter by its name: a local folder, or a hub id.

Promises: if the hub cannot be reached, the command fails after one request of a few seconds; pickled files are never
opened.
"""

import os
import shlex
from pathlib import Path
from typing import Any

import huggingface_hub  # loads its parts, which are slow to import, when they are used
from huggingface_hub import constants

from kit.config.adapter_base import adapter_config, is_local
from kit.config.commands import command_of
from kit.config.other_kits import GGUF
from kit.config.settings.method import MethodSettings
from kit.config.settings.model import ModelSettings
from kit.hub import hub_errors
from kit.model.pretrained.files import check_config, check_files, check_index
from kit.system.errors import Problem, Problems, UserError, first_line, raise_if

HUB_SECONDS = 5.0  # to wait for the hub's first answer
# Settings that name what is opened.
_MODEL = "model_name_or_path"
_ADAPTER = "adapter_name_or_path"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
# The files of an adapter's tokenizer. An adapter with a tokenizer always has the first one.
TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def locate_model(name: str, revision: str | None) -> str:
    """Return the folder or hub id to open.

    Raises:
        UserError: the folder has no model, or the hub id cannot be opened. Equal calls give equal problems, so that
            a problem that several checks find is reported once.
    """
    folder = os.path.expanduser(name)
    if name.endswith(".gguf"):
        raise UserError(_MODEL, name, "a folder with config.json and safetensors, or a hub id", GGUF)
    expected = "a folder with config.json, or a hub id"
    if os.path.isfile(folder):
        raise UserError(_MODEL, f"{name} is a file", expected)
    if not is_local(name):
        _check_hub_has(name, revision, _MODEL, "config.json")
        if isinstance(config := huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision), str):
            check_config(Path(config))
        return name
    if os.path.isfile(os.path.join(folder, "config.json")):
        check_files(Path(folder), _MODEL)
        check_config(Path(folder, "config.json"))
        check_index(Path(folder))
        return folder
    if os.path.isfile(os.path.join(folder, "manifest.json")):
        raise UserError(_MODEL, f"{name} is a checkpoint, not a model", expected, _export(name))
    found = "no config.json in it" if os.path.isdir(folder) else "no such folder"
    raise UserError(_MODEL, f"{name}: {found}", expected, hint_final(folder))


def commit_of(name: str, revision: str | None) -> str | None:
    """Return the commit of a hub id whose config was fetched; None for a folder.

    It is read from the hub's cache, where files lie in folders named after their commit: transformers no longer
    returns it.
    """
    if is_local(name):
        return None
    path = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(path).parent.name if isinstance(path, str) else revision or "main"


def has_weights(settings: ModelSettings) -> bool:
    """Return whether the model's folder, or the hub's cache, holds weights of the model in safetensors."""
    name = settings.model_name_or_path
    config: Any = os.path.join(os.path.expanduser(name), "config.json")
    if not is_local(name):
        config = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=settings.model_revision)
    return isinstance(config, str) and any(Path(config).parent.glob("*.safetensors"))


def check_weight_files(settings: ModelSettings, needs_weights: bool) -> list[Problem]:
    """Return a problem if the model's folder has no weights that can be opened.

    Args:
        needs_weights: whether a folder without weights is a problem; one with pickled weights only always is.
    """
    folder = Path(os.path.expanduser(settings.model_name_or_path))
    if not os.path.isdir(folder) or has_weights(settings):
        return []
    pickled = ", ".join(sorted(path.name for path in folder.glob("*.bin")))
    if pickled:
        fix = "convert them: pickled weights are never opened"
        return [Problem(_MODEL, f"{pickled} in {folder}", "*.safetensors", fix)]
    return [Problem(_MODEL, f"no weights in {folder}", "*.safetensors")] if needs_weights else []


def folder_problems(settings: MethodSettings, needs_weights: bool) -> list[Problem]:
    """Return what is wrong with the model and the adapter, as far as their folders show it. Asks no hub.

    Args:
        needs_weights: see ``check_weight_files``.
    """
    problems = Problems()
    name, adapter = settings.model_name_or_path, settings.adapter_name_or_path
    with problems.caught():
        if is_local(name) or name.endswith(".gguf"):
            locate_model(name, settings.model_revision)
            problems += check_weight_files(settings, needs_weights)
    with problems.caught():
        if adapter and is_local(adapter):
            open_adapter(adapter)
    return problems


def hint_final(folder: str | Path) -> str:
    """Return where the model is of a run whose output folder is ``folder``, or of an adapter; else an empty string."""
    final = os.path.join(folder, "final")
    model = final if os.path.isdir(final) else str(folder)
    if os.path.isfile(os.path.join(model, ADAPTER_FILES[0])):
        return _export(model)
    return f"did you mean {final}?" if model == final else ""


def _export(source: str) -> str:
    return f"`{command_of('export.py')} {shlex.quote(source)} --output_dir MODEL` makes one"


def open_adapter(name: str) -> Path:
    """Return the folder with an adapter's two files, and those of its tokenizer if it has one.

    The files of a hub id are downloaded.

    Raises:
        UserError: a file is missing, or the hub id cannot be opened.
    """
    folder = Path(os.path.expanduser(name)) if is_local(name) else _download_adapter(name)
    if not os.path.isdir(folder):
        raise UserError(_ADAPTER, f"{name}: no such folder", "a folder with adapter_config.json, or a hub id")
    is_pickled = os.path.isfile(folder / "adapter_model.bin")
    fix = "convert adapter_model.bin: pickled weights are never opened" if is_pickled else ""
    if (final := folder / "final" / ADAPTER_FILES[0]).is_file():
        fix = f"did you mean {final.parent}?"
    absent = [file for file in ADAPTER_FILES if not os.path.isfile(folder / file)]
    raise_if(Problem(_ADAPTER, f"no {file} in {name}", fix=fix) for file in absent)
    check_files(folder, _ADAPTER)
    return folder


def _download_adapter(name: str) -> Path:
    """The folder in the hub's cache with the files of an adapter, which are downloaded if they are not there."""
    files = [*ADAPTER_FILES, *TOKENIZER_FILES]
    _check_hub_has(name, None, _ADAPTER, *ADAPTER_FILES)
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=files, etag_timeout=HUB_SECONDS))
    except Exception as error:
        raise UserError(_ADAPTER, f"{name}: {first_line(error)}", " and ".join(ADAPTER_FILES)) from None


def base_of_adapter(folder: Path) -> str:
    """Return the base model that a local adapter names.

    Raises:
        UserError: the adapter names no base, or the base cannot be opened.
    """
    where, fix = str(folder / ADAPTER_FILES[0]), "give the base: --model_name_or_path BASE"
    base = adapter_config(str(folder)).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise UserError(where, "names no base", fix=fix)
    check_base(where, base, None, fix)
    return base


def check_base(where: str, base: str, revision: str | None, fix: str) -> None:
    """Raise ``UserError`` if the model ``base`` cannot be opened.

    Args:
        where: the file that names ``base``, for the message.
        fix: what to do, for the message.
    """
    try:
        locate_model(base, revision)
    except UserError as error:
        found = f"names a base that cannot be opened: {error.problems[0].found}"
        raise UserError(where, found, fix=fix) from None


def _check_hub_has(name: str, revision: str | None, field: str, *files: str) -> None:
    """Raise ``UserError`` if the hub does not have ``name``.

    Makes no request offline (``HF_HUB_OFFLINE``), or if all ``files`` are in the local cache. Else makes one short
    request, because transformers would retry for half a minute for each file, and a second one if the model is gated.
    """
    try:
        if all(huggingface_hub.try_to_load_from_cache(name, file, revision=revision) for file in files):
            return
        if not constants.HF_HUB_OFFLINE:
            hub_errors.check_access(
                name, "model", huggingface_hub.HfApi().model_info(name, revision=revision, timeout=HUB_SECONDS)
            )
            return
    except Exception as error:  # connection errors, whose classes depend on the HTTP library in use
        raise UserError(hub_errors.refusal(error, f"no folder {name!r}", name, "model", field)) from None
    if field == _MODEL:
        raise UserError(hub_errors.not_cached(f"no folder {name!r}", name, "model", field))


def hint_trust(error: BaseException) -> str:
    """Return how to fix ``error`` if it says that the model needs its own code; else an empty string."""
    needs_code = "trust_remote_code" in str(error)
    return "--trust_remote_code true runs the model's own code: read it first" if needs_code else ""


def hub_options(settings: ModelSettings, is_checked: bool = False) -> dict[str, Any]:
    """Return the arguments of each ``from_pretrained`` of the base model.

    Args:
        is_checked: its config was fetched before. Then other files are fetched of the same commit, and those in the
            cache are opened without a request.
    """
    revision = settings.model_revision or "main"
    commit = commit_of(settings.model_name_or_path, settings.model_revision) if is_checked else None
    return {"revision": commit or revision, "trust_remote_code": settings.trust_remote_code}
