"""From the name of a model or an adapter to a folder, or to a hub id that can be fetched.

Promises: an unreachable hub is asked once, for a few seconds; a file that would have to be unpickled is never opened.
"""

import json
import os
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

from kit.errors import Problem, UserError, kind

HUB_SECONDS = 5.0  # to wait for the hub's first answer
_MODEL = "model_name_or_path"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
# Of an adapter that brings a tokenizer; the first is always there.
TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def locate_model(name: str, revision: str | None) -> str:
    """The folder or hub id to open. Refuses what holds no model or cannot be had; always with the same problem."""
    folder = os.path.expanduser(name)
    if not _is_local(name):
        _ask_hub(name, revision, _MODEL, "config.json")
        return name
    if os.path.isfile(os.path.join(folder, "config.json")):
        _check_json(Path(folder))
        return folder
    found = "no config.json in it" if os.path.isdir(folder) else "no such folder"
    raise UserError(Problem(_MODEL, f"{name}: {found}", "a folder with config.json, or a hub id", hint_final(folder)))


def commit_of(name: str, revision: str | None) -> str | None:
    """The commit of a hub id whose config was fetched; None for a folder.

    transformers tells it no longer. The hub's cache does: files lie in folders named after their commit.
    """
    if _is_local(name):
        return None
    path = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(path).parent.name if isinstance(path, str) else revision or "main"


def hint_final(folder: str | Path) -> str:
    """What was meant by the folder of a run where a model was to be named; empty for any other folder."""
    final = os.path.join(folder, "final")
    return f"did you mean {final}?" if os.path.isdir(final) else ""


def _check_json(folder: Path) -> None:
    """Refuse a model's folder where transformers would fall over a file it opens with the weights. Raises
    ``UserError``."""
    for name in ("generation_config.json", "adapter_config.json", "model.safetensors.index.json"):
        path = folder / name
        is_index = name.endswith(".index.json")
        if not path.is_file() or (is_index and (folder / "model.safetensors").is_file()):
            continue  # an index beside undivided weights is not opened
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            if name == "generation_config.json":
                continue  # transformers goes on without
            raise UserError(Problem(_MODEL, f"{path} is no JSON ({first_line(error)})")) from None
        if not isinstance(values, dict):
            raise UserError(Problem(_MODEL, f"{path} holds {kind(values)}", "an object"))
        if not is_index:
            continue
        shards, metadata = values.get("weight_map"), values.get("metadata")
        files = list(shards.values()) if isinstance(shards, dict) and isinstance(metadata, dict) else []
        if not files or not all(isinstance(file, str) for file in files):
            found = f"{path} does not say which weights are in which file"
            raise UserError(Problem(_MODEL, found, "weight_map and metadata"))


def open_adapter(name: str) -> Path:
    """The folder with an adapter's two files, and its tokenizer's if it has one; those of a hub id are fetched.

    Raises ``UserError``.
    """
    field = "adapter_name_or_path"
    folder = Path(os.path.expanduser(name))
    if _is_local(name):
        absent = [file for file in ADAPTER_FILES if not os.path.isfile(folder / file)]
        if not os.path.isdir(folder):
            raise UserError(Problem(field, f"{name}: no such folder", "a folder with adapter_config.json, or a hub id"))
        pickled = os.path.isfile(folder / "adapter_model.bin")
        fix = "convert adapter_model.bin: pickled weights are never opened" if pickled else ""
        if absent:
            raise UserError(*(Problem(field, f"no {file} in {folder}", fix=fix) for file in absent))
        return folder
    files = (*ADAPTER_FILES, *TOKENIZER_FILES)
    _ask_hub(name, None, field, *files)
    try:
        found = [try_to_load_from_cache(name, file) for file in files]  # what is not there is remembered too
        if not all(found) or not all(isinstance(path, str) for path in found[: len(ADAPTER_FILES)]):
            found = [_fetch(name, file) for file in files]
        return Path(str(found[0])).parent
    except Exception as error:
        raise UserError(Problem(field, f"{name}: {first_line(error)}", " and ".join(ADAPTER_FILES))) from None


def _fetch(name: str, file: str) -> str | None:
    try:
        return hf_hub_download(name, file)
    except EntryNotFoundError:
        if file in ADAPTER_FILES:
            raise
        return None


def tokenizer_of_adapter(name: str) -> Path | None:
    """The adapter's folder, if there is a tokenizer in it."""
    folder = open_adapter(name)
    return folder if (folder / TOKENIZER_FILES[0]).is_file() else None


def base_of_adapter(folder: Path, fix: str) -> str:
    """The base that a local adapter names, there to be opened. Raises ``UserError``, with ``fix``, if it is not."""
    where = str(folder / ADAPTER_FILES[0])
    try:
        base = json.loads(Path(where).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(Problem(where, f"is no adapter's ({first_line(error)})", fix=fix)) from None
    if not base or not isinstance(base, str):
        raise UserError(Problem(where, "names no base", fix=fix))
    check_base(where, base, None, fix)
    return base


def check_base(where: str, base: str, revision: str | None, fix: str) -> None:
    """Refuse, with the problem at ``where``, if the ``base`` named there is not there to be opened."""
    try:
        locate_model(base, revision)
    except UserError as error:
        raise UserError(
            Problem(where, f"names a base that cannot be opened: {error.problems[0].found}", fix=fix)
        ) from None


def _is_local(name: str) -> bool:
    return os.path.exists(name) or name.startswith((".", "/", "~")) or name.count("/") > 1


def _ask_hub(name: str, revision: str | None, field: str, *files: str) -> None:
    """One short request: transformers retries for half a minute, for each of its files. Raises ``UserError``."""
    try:
        if constants.HF_HUB_OFFLINE or all(try_to_load_from_cache(name, file, revision=revision) for file in files):
            return
        HfApi().model_info(name, revision=revision, timeout=HUB_SECONDS)
    except HFValidationError as error:
        found = f"no folder {name!r}, and it is no hub id ({first_line(error)})"
        raise UserError(Problem(field, found, "a local folder, or a hub id")) from None
    except HfHubHTTPError as error:
        found = f"no folder {name!r}, and the hub refuses it ({first_line(error)})"
        fix = "check the name; a private or gated model needs `hf auth login`"
        raise UserError(Problem(field, found, fix=fix)) from None
    except Exception as error:  # the connection's own, of whichever client library is in use
        found = f"no folder {name!r}, and the hub cannot be reached ({first_line(error)})"
        raise UserError(Problem(field, found, "a local folder, or a network")) from None


def first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
