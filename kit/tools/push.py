"""Upload a model folder to the hub: ``kit push``.

Promises: all that can be checked is checked before anything is uploaded. Only files of the model are uploaded, in one
commit, and none that holds a credential. Files on this machine are not changed. What the hub has already is not
uploaded again.
"""

import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import disable_progress_bars, filter_repo_objects

from kit.checkpoint.manifest import MANIFEST
from kit.export.card import LICENCE_OF_BASE, PLACEHOLDER, as_code, licence_in
from kit.hub.upload import KINDS, answers, find_repository, is_id, url_of
from kit.model.adapters.serving import serve_command
from kit.run.record import RUN_FILE
from kit.system.console import show
from kit.system.credentials import secret_spans
from kit.system.durable import read_small
from kit.system.errors import Problem, UserError, first_line, listed, raise_if

# Of a folder that ``from_pretrained`` opens.
_WEIGHTS = (
    "model.safetensors model-*-of-*.safetensors model.safetensors.index.json adapter_model.safetensors "
    "adapter_model-*-of-*.safetensors adapter_model.safetensors.index.json *.gguf"
).split()
_VOCABULARIES = (
    "tokenizer.json vocab.json vocab.txt merges.txt *.tiktoken tokenizer.model spiece.model sentencepiece*.model"
).split()
_OTHERS = (
    "README.md LICENSE* NOTICE* config.json adapter_config.json generation_config.json tokenizer* added_tokens.json "
    "special_tokens_map.json chat_template.jinja chat_template.json processor_config.json preprocessor_config.json "
    "video_preprocessor_config.json configuration_*.py modeling_*.py modular_*.py tokenization_*.py"
).split()
_EXPORT = "`kit export` of a checkpoint writes one"


@dataclass(frozen=True)
class Model:
    """What is uploaded."""

    folder: Path
    files: list[str]  # in ``folder``
    adapter: dict[str, Any] | None  # adapter_config.json; None: a full model
    card: ModelCard
    base: str | None  # hub id; None: not known, of a full model that was made from a folder


def push(source: str, name: str | None, public: bool, base_model: str | None) -> None:
    """Check the model, the name and the rights, say what is uploaded, and upload it. The arguments are as typed.

    Raises:
        UserError: the model is not complete, the hub refuses it, or cannot be reached.
    """
    model = open_model(Path(source).expanduser(), base_model)
    name = name or _usual_name(model.folder)
    show(_summary(model, name if "/" in name else f"YOU/{name}", public))
    api = HfApi()
    repo = find_repository(api, name, model.adapter is not None, public, "NAME")
    card = finished_card(model, repo, _licence_on_hub(api, model))
    if public and not getattr(model.card.data, "license", None):
        show("warning: the model card has no licence, because the base's card has none")
    if not sys.stderr.isatty():
        disable_progress_bars()
    message = f"kit push: {KINDS[model.adapter is not None]}"
    with answers(repo), TemporaryDirectory() as folder:
        _gather(model, card, Path(folder))
        api.create_repo(repo, private=not public, exist_ok=True)
        # One commit. It deletes weights of an earlier model of other shards.
        info = api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message, delete_patterns=_WEIGHTS)
    show(f"uploaded: {url_of(repo)}, commit {info.oid}")


def _usual_name(folder: Path) -> str:
    """The name of the run, or of the folder, in the characters that the hub takes."""
    path = Path(os.path.realpath(folder))
    name = path.parent.name if path.name == "final" else path.name
    return re.sub(r"[^\w.]+|\.\.+", "-", name, flags=re.ASCII).strip("-.")


def _summary(model: Model, repo: str, public: bool) -> str:
    """What is uploaded, and what of the folder is not."""
    of_base = f" of {model.base}" if model.base else ""
    what = f"{KINDS[model.adapter is not None]}{of_base} in {model.folder}"
    num_bytes = sum((model.folder / name).stat().st_size for name in model.files)
    lines = [f"{what}, to {url_of(repo)}{'' if public else ', private'}:"]
    lines += [f"  {', '.join(model.files)}; {num_bytes:,} bytes"]
    others = sorted({path.name for path in model.folder.iterdir()} - set(model.files))
    if others:
        lines += [f"not uploaded (not part of the model): {listed(others)}"]
    return "\n".join(lines)


# --- the folder


def open_model(folder: Path, base: str | None) -> Model:
    """Check that the model in ``folder``, or of the run in it, is complete and holds no credential.

    Raises:
        UserError: it is not, or there is none, with what to do.
    """
    if (folder / RUN_FILE).is_file():
        if not (folder / "final").is_dir():
            raise UserError("RUN", f"{folder} has no final/ yet", "a run that has ended", _EXPORT)
        folder /= "final"
    if (folder / MANIFEST).is_file():
        raise UserError("RUN", f"{folder} is a checkpoint, which only this kit opens", "a model", _EXPORT)
    if not folder.is_dir():
        raise UserError("RUN", f"no folder {folder}", "the folder of a run, its final/, or an exported model")
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    files = list(filter_repo_objects(names, allow_patterns=[*_WEIGHTS, *_VOCABULARIES, *_OTHERS]))
    _check_complete(folder, files)
    adapter = _read_json(folder / "adapter_config.json") if "adapter_config.json" in files else None
    try:
        card = ModelCard(read_small(folder / "README.md"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(str(folder / "README.md"), f"no model card ({first_line(error)})") from None
    # Weights are numbers, and vocabularies are nobody's text.
    _check_credentials(
        folder / name for name in filter_repo_objects(files, ignore_patterns=[*_WEIGHTS, *_VOCABULARIES])
    )
    return Model(folder, files, adapter, card, _base_of(card, adapter, base))


def _check_complete(folder: Path, files: list[str]) -> None:
    """Raise ``UserError`` if a file that opens the model is missing."""
    if any(name.endswith(".gguf") for name in files):
        return
    if not {"config.json", "adapter_config.json"} & set(files):
        raise UserError("RUN", f"{folder} holds no model: no config.json, no adapter_config.json, no *.gguf")
    stem = "adapter_model" if "adapter_config.json" in files else "model"
    index = f"{stem}.safetensors.index.json"
    needed = {f"{stem}.safetensors"}
    if index in files:
        needed = set(_read_json(folder / index).get("weight_map", {}).values()) or needed
    if missing := sorted({*needed, "tokenizer_config.json"} - set(files)):
        raise UserError(str(folder), f"an incomplete model: no {listed(missing)}", "a complete one", _EXPORT)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(read_small(path))
    except (OSError, ValueError) as error:
        raise UserError(str(path), f"invalid JSON ({first_line(error)})", fix="export it again") from None
    return values if isinstance(values, dict) else {}


def _check_credentials(paths: Iterable[Path]) -> None:
    """Raise ``UserError`` for files with a credential."""
    problems = []
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        if spans := secret_spans(text):
            line = text.count("\n", 0, spans[0][0]) + 1
            fix = "take it out of the file, and renew it if others have seen it"
            problems.append(Problem(f"{path}:{line}", "a credential", "no credential", fix))
    raise_if(problems)


def _base_of(card: ModelCard, adapter: dict[str, Any] | None, typed: str | None) -> str | None:
    """The hub id of the base: as typed, or as on the card. A full model may have none."""
    given = getattr(card.data, "base_model", None)
    found = typed or (given[0] if isinstance(given, list) and given else given)
    if isinstance(found, str) and is_id(found):
        return found
    if typed:
        raise UserError("--base_model", f"{typed!r} is not a hub id", "its id on the hub")
    if adapter is not None:
        text = "a local folder, which others cannot open"
        raise UserError("the base", text, "its id on the hub", "--base_model ID")
    return None


# --- the card


def finished_card(model: Model, repo: str, licence: dict[str, Any]) -> str:
    """Return the card for the hub: with the base's id and licence, and how to load and serve the model from there."""
    card = model.card
    text = card.text
    if base := model.base:
        card.data["base_model"] = base
        text = re.sub(r"(?m)^- base: .*$", lambda _: f"- base: `{base}`", text, count=1)
    if licence:
        for key, value in licence.items():
            card.data[key] = value
        name = as_code(licence.get("license_name", licence["license"]))
        text = text.replace(LICENCE_OF_BASE, f"- licence of the base: {name}")
    text = text.replace(json.dumps(PLACEHOLDER), json.dumps(repo))
    text = text.replace(serve_command(PLACEHOLDER), serve_command(repo))
    fetched = f"hf download {repo} --local-dir adapter\nkit export adapter "
    text = re.sub(rf"(?m)^(?:python recipes/export\.py|kit export) {re.escape(PLACEHOLDER)} ", fetched, text)
    card.text = text
    return f"---\n{card.data.to_yaml()}\n---\n{text}"


# --- the hub


def _licence_on_hub(api: HfApi, model: Model) -> dict[str, Any]:
    """The licence that the base's card on the hub names, as metadata.

    Raises:
        UserError: the hub has no such base, or cannot be asked.
    """
    if model.base is None:
        return {}
    with answers(model.base):
        try:
            data = api.model_info(model.base).card_data
        except RepositoryNotFoundError:
            found = f"the hub shows you no model {model.base}"
            raise UserError("the base", found, "its id", "--base_model ID") from None
    return licence_in(data.to_dict()) if data else {}


def _gather(model: Model, card: str, folder: Path) -> None:
    """Link the files of the model into ``folder``, and write what is other on the hub: the card, the adapter's base."""
    for name in model.files:
        (folder / name).symlink_to((model.folder / name).resolve())
    written = {"README.md": card}
    if model.adapter is not None:
        config = model.adapter | {"base_model_name_or_path": model.base}
        written["adapter_config.json"] = json.dumps(config, indent=2)
    for name, text in written.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
