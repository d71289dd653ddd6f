"""What is exported: a run, its checkpoint, its ``final/``, an adapter, or a model; and the folder that is made of it.

Promises: whatever is made was compared with what was trained, see ``proof.py``, and names its base, data and metrics.
"""

import gc
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kit.checkpoint.load import read_weights
from kit.checkpoint.manifest import MANIFEST, read_state
from kit.config.adapter_base import saved_adapter_type
from kit.config.recipe import Recipe
from kit.config.settings.method import MethodSettings
from kit.console import announce_wait, say
from kit.data.chat.template import resolve_template
from kit.errors import Problem, UserError, raise_if
from kit.export import gguf, ollama, torchao
from kit.export.card import gguf_card, torchao_card
from kit.export.checkpoint import (
    Wanted,
    Written,
    card_of_folder,
    copy_model,
    export_checkpoint,
    merge_adapter,
    open_model,
    opener,
)
from kit.export.final import copy_processor, give_usual_mode
from kit.export.proof import check_folder, plain_template, score
from kit.model.classes import auto_class
from kit.model.load import open_config
from kit.model.locate import base_of_adapter, hint_final
from kit.model.tokenizer import open_tokenizer
from kit.run.opening import run_of
from kit.run.record import RUN_FILE, read_run, with_model_of_checkpoint
from kit.train.loop_state import LoopState


@dataclass(frozen=True)
class Source:
    """What is exported."""

    settings: MethodSettings  # they open the model, or the base with its adapter
    checkpoint: Path | None  # to load into that model; None: ``settings`` open it with its weights
    run_file: Path | None  # ``run.json`` of the run; None: it is not known how the model was trained
    name: str  # for files that are named after it

    @property
    def run(self) -> Recipe | None:
        """The recipe of the run; None: it is not known how the model was trained."""
        return read_run(self.run_file)[0] if self.run_file else None

    @property
    def is_model(self) -> bool:
        """Whether it is a full model already."""
        return self.checkpoint is None and self.settings.method == "full"


def find_source(path: Path, base: str | None, trust_remote_code: str) -> Source:
    """Find out what ``path`` is, and how to open it.

    Args:
        base: where the base is now, if it is no longer at its own path.
        trust_remote_code: "true" or "false".

    Raises:
        UserError: it is nothing that can be exported.
    """
    source = Path(os.path.realpath(path.expanduser()))
    if os.path.isfile(source / RUN_FILE) and os.path.isdir(source / "final"):
        source /= "final"
    # Weights are read and merged, or a few sequences computed, so the kernel of attention does not matter.
    how = {"attn_implementation": "eager", "trust_remote_code": trust_remote_code}
    run_file = run_of(str(source))
    name = source.parent.name if source.name == "final" else source.name
    name = re.sub(r"[^\w.-]+", "-", name)
    if os.path.isfile(source / "adapter_config.json"):
        base = base or base_of_adapter(source, "give the base: --model_name_or_path BASE")
        names = {"model_name_or_path": base, "adapter_name_or_path": str(source)}
        names |= {"adapter_type": saved_adapter_type(str(source))}
        return Source(MethodSettings.model_validate(names | how), None, run_file, name)
    if os.path.isfile(source / MANIFEST):
        settings = MethodSettings.model_validate({"model_name_or_path": base or str(source)} | how)
        settings = with_model_of_checkpoint(settings, source, "checkpoint", base)
        settings = settings.model_copy(update={"qat": None, "qat_group_size": None})  # plain weights are written
        run_folder = source.parents[1]
        return Source(settings, source, run_folder / RUN_FILE, f"{run_folder.name}-{source.name}")
    if os.path.isfile(source / "config.json"):
        settings = MethodSettings.model_validate({"model_name_or_path": str(source), "method": "full"} | how)
        return Source(settings, None, run_file, name)
    found = f"no {MANIFEST}, no adapter_config.json, no config.json"
    expected = "a run, a complete checkpoint, an adapter or a model"
    raise UserError(Problem(str(path), found, expected, hint_final(path)))


def write_folder(opened: Source, folder: Path, wanted: Wanted) -> tuple[str, Written]:
    """Write a folder that ``from_pretrained`` opens, and compare it. Returns what it is, and the model.

    Raises:
        UserError: a model cannot be opened, or does not fit.
        TrainingError: what was written is not what was trained.
    """
    settings, run_file = opened.settings, opened.run_file
    if opened.is_model:
        return "model", copy_model(settings, run_file, folder, wanted)
    read = state = None
    if opened.checkpoint:
        read = partial(read_weights, path=opened.checkpoint)
        state = LoopState.from_record(read_state(opened.checkpoint, LoopState().record()))
    is_full = settings.method == "full"
    if read and state and run_file and (is_full or not wanted.merges):
        what = f"{'model' if is_full else 'adapter'} after step {state.step}"
        return what, export_checkpoint(settings, run_file, state, read, folder, wanted)
    if (run := opened.run) and run.qat:
        group = f" --qat_group_size {run.qat_group_size}" if run.qat_group_size else ""
        flags = f"--output_dir rounded --format torchao --qat {run.qat}{group}"
        say(
            "note: this run rounded its base, and the merge takes the base as it is, so the merged model computes "
            "something else than was trained. That is the adapter on the base as it was: "
            f"`kit export {settings.model_name_or_path} {flags}`"
        )
    return "merged model", merge_adapter(settings, run_file, state, read, folder, wanted)


def write_gguf_folder(
    opened: Source, folder: Path, wanted: Wanted, tools: gguf.Tools, types: Sequence[str], has_modelfile: bool
) -> str:
    """Write GGUF files of ``types``, with a card, and compare them. Returns what they are.

    Args:
        has_modelfile: whether Ollama's file is written beside them.

    Raises:
        UserError: llama.cpp's converter does not know the model or its tokenizer, or Ollama not its chat template.
        TrainingError: what was written is not what was trained.
    """
    settings = opened.settings
    config, tokenizer = open_config(settings), open_tokenizer(settings)
    run = opened.run
    if opened.checkpoint and run:
        tokenizer.chat_template = resolve_template(tokenizer, run.chat_template, run.chat_template_kwargs)
    work = folder / "work"
    tools, lines = gguf.check_tokenizer(tools, settings, config, tokenizer, work)
    template = plain_template(tokenizer)
    frame = ollama.find_frame(template) if has_modelfile and template else None
    say(*lines)
    plain, written, card = _write_plain(opened, work, wanted)
    tokenizer, eos = written.tokenizer, written.model.generation_config.eos_token_id
    gguf.prepare_tokenizer(tokenizer, plain)
    reference = score(written.model, written.rows)
    rows = written.rows
    del written
    gc.collect()
    files = gguf.write_gguf(tools, plain, folder, opened.name, types)
    compared, has_bos = [], False
    for type_, file in files.items():
        bound = gguf.BOUNDS[type_] if wanted.max_change is None else wanted.max_change
        lines, has_bos = gguf.check_gguf(tools, file, rows, tokenizer, reference, bound)
        say(*lines)
        compared += lines
    shutil.rmtree(work)
    names = [file.name for file in files.values()]
    if has_modelfile:
        stops = ollama.stop_tokens(tokenizer, eos)
        bos = tokenizer.bos_token if has_bos else None
        text = ollama.modelfile(names[-1], frame, stops, run.system_prompt if run else None, bos)
        (folder / "Modelfile").write_text(text, encoding="utf-8")
        say(f"for Ollama: `ollama create {opened.name.lower()} -f Modelfile` in the folder takes {names[-1]}")
    (folder / "README.md").write_text(gguf_card(card, names, compared, has_modelfile), encoding="utf-8")
    return f"{', '.join(names)} of {opened.name}"


def write_torchao_folder(opened: Source, folder: Path, wanted: Wanted, scheme: str, group_size: int | None) -> str:
    """Write the model with weights rounded by torchao, and compare it. Returns what it is.

    Args:
        scheme: ``qat``.
        group_size: ``qat_group_size``.

    Raises:
        UserError: it cannot be opened, or not be rounded so.
        TrainingError: what was written does not compute what ``qat`` trains.
    """
    settings = torchao.rounded(opened.settings, scheme, group_size)
    raise_if(torchao.check(settings))
    work = folder / "work"
    work.mkdir()
    plain, written, card = _write_plain(opened, work, wanted)
    config, rows, tokenizer = written.model.config, written.rows, written.tokenizer
    loader = auto_class(config)
    dtype = written.model.dtype
    announce_wait("rounding the weights")
    expected, lines = torchao.write(written.model, plain, folder, settings, rows, wanted.shard_bytes, loader)
    del written
    gc.collect()
    copy_processor(folder, config)
    tokenizer.save_pretrained(folder)
    shutil.rmtree(work)
    compared, _ = check_folder(folder, rows, tokenizer, expected, wanted.bound(dtype), opener(settings, loader))
    say(*lines, *compared)
    (folder / "README.md").write_text(torchao_card(card, [*lines, *compared]), encoding="utf-8")
    give_usual_mode(folder)
    return f"{opened.name} in {scheme}"


def _write_plain(opened: Source, work: Path, wanted: Wanted) -> tuple[Path, Written, str]:
    """Return the folder, in ``work``, of the plain model that something else is made of; the model; and its card."""
    plain = work / "plain"
    plain.mkdir()
    if not opened.is_model or wanted.dtype is not None:
        _, written = write_folder(opened, plain, wanted)
        return plain, written, (plain / "README.md").read_text(encoding="utf-8")
    written = open_model(opened.settings, opened.run_file, wanted)
    for path in Path(opened.settings.model_name_or_path).iterdir():
        if path.is_file() and not path.name.startswith(("tokenizer", "chat_template")):
            os.symlink(path, plain / path.name)
    return plain, written, card_of_folder(opened.settings, written.tokenizer, auto_class(written.model.config))
