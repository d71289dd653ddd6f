"""Turn a checkpoint of a run into a model folder, or merge an adapter into its base. Runs in one process.

Promises: a model is checked before any weight is read; what was written is opened again, and is the model that was
trained, or nothing is left.
"""

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from kit import durable
from kit.config.dataset_entry import DatasetEntry
from kit.config.recipe import Recipe
from kit.config.settings.method import MethodSettings
from kit.console import say
from kit.data.chat.template import resolve_template
from kit.errors import Problem, TrainingError, UserError, raise_if
from kit.export.card import card_without_run, model_card, state_of
from kit.export.final import (
    card_for_servers,
    check_learned,
    copy_processor,
    describe_serving,
    give_usual_mode,
    write_model,
)
from kit.export.proof import BOUNDS, SHARE, Rows, Scores, change_between, check_folder, find_rows, score
from kit.export.shards import MAX_SHARD_BYTES
from kit.export.stops import describe_stops, new_stops, open_generation_config, read_stops, write_stops
from kit.export.transformers4 import write_for_transformers_4
from kit.model.adapter import adapters_off, attach_adapter
from kit.model.classes import auto_class
from kit.model.dequantise import class_that_dequantises
from kit.model.load import build_meta_model, build_model, check_model, open_config
from kit.model.plan import LoadPlan
from kit.model.token_rows import num_rows
from kit.model.tokenizer import open_tokenizer
from kit.run.record import read_run, read_stop_tokens
from kit.strategy.weights import whole_state
from kit.train.loop_state import LoopState

# Reads a checkpoint's weights into a model, and returns them by their names in it (``read_weights`` with its path).
Read = Callable[[Any], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Wanted:
    """How a model is written, and what it is compared on."""

    dtype: str | None  # of the weights; None: that of the base, of a merged model bfloat16
    shard_bytes: int = MAX_SHARD_BYTES  # the largest file, unless it has a single tensor
    rows: DatasetEntry | None = None  # to compare on; None: the run's own
    max_change: float | None = None  # nats per token; None: ``BOUNDS``, and of a merge ``SHARE``
    output_dir: Path = Path("model")  # for messages: what is written has another name until it is complete
    merges: bool = False  # the adapter of a checkpoint too

    def bound(self, dtype: torch.dtype) -> float:
        """Return the bound of what an opened model may differ by."""
        return BOUNDS[str(dtype)[6:]] if self.max_change is None else self.max_change


@dataclass(frozen=True)
class Written:
    """A model folder that was written and compared."""

    run: Recipe | None  # None: not known
    tokenizer: Any
    rows: Rows
    model: Any  # as plain transformers opened it; None: an adapter


def export_checkpoint(
    settings: MethodSettings, run_file: Path, state: LoopState, read: Read, folder: Path, wanted: Wanted
) -> Written:
    """Write a checkpoint as a model folder: what ``final/`` would be after its step. Runs in one process.

    Args:
        settings: open the model of the run, see ``with_model_of_run``.
        run_file: ``run.json`` of the run, for the card and the chat template.
        state: the state of the loop in the checkpoint.
        read: reads the checkpoint's weights.
        folder: empty.
        wanted: its dtype is that of a full model's weights.

    Raises:
        UserError: the base cannot be opened or does not fit the checkpoint.
        TrainingError: the adapter has learned nothing, or what was written is not what was trained.
    """
    run, strategy = read_run(run_file)
    run = run.model_copy(update={"model_name_or_path": settings.model_name_or_path})  # it may have moved
    tokenizer, config, model = _open(settings)
    open_generation_config(settings, model)
    stops = new_stops(model, read_stop_tokens(run_file))
    tokenizer.chat_template = resolve_template(tokenizer, run.chat_template, run.chat_template_kwargs)
    loader = auto_class(config)
    dequantised_by = class_that_dequantises(config)
    card = model_card(run, strategy, state, bool(tokenizer.chat_template), stops, loader.__name__, dequantised_by)
    is_full = settings.method == "full"
    dtype = getattr(torch, wanted.dtype) if wanted.dtype else config.dtype or torch.float32
    rows = find_rows(run, tokenizer, wanted.rows, num_rows(model))
    if is_full:
        model = build_model(settings, config, LoadPlan(compute_dtype="float32", device="cpu"))
        read(model)
        reference = score(model, rows)
        tensors = whole_state(model)
    else:  # nothing of the base is written, so only its shapes are needed
        model = attach_adapter(model, settings)
        tensors = read(model)
    write_model(folder, model, tensors, tokenizer, card, dtype, stops, wanted.shard_bytes)
    lines = [*describe_stops(stops, str(wanted.output_dir)), *describe_serving(model, wanted.output_dir)]
    if not is_full:
        say(*lines, _check_tensors(folder, tensors))
        return Written(run, tokenizer, rows, None)
    del model, tensors
    gc.collect()
    say(*lines)
    return _checked(folder, settings, loader, run, tokenizer, rows, reference, wanted.bound(dtype))


def merge_adapter(
    settings: MethodSettings,
    run_file: Path | None,
    state: LoopState | None,
    read: Read | None,
    folder: Path,
    wanted: Wanted,
) -> Written:
    """Merge an adapter into its unquantised base, never into 4-bit weights, and save a plain model.

    Args:
        settings: open the base with its adapter.
        run_file: ``run.json`` of the run; None: it is not known how the adapter was trained.
        state: the state of the loop in a checkpoint; None: the end of the run.
        read: reads a checkpoint into the adapter; None if ``settings`` open the trained adapter itself.
        folder: empty.
        wanted: its dtype is that of the merged weights; adapter and base are added in it.

    Raises:
        UserError: adapter or base cannot be opened, or do not fit each other.
        TrainingError: the adapter has learned nothing, or what was written is not what was trained.
    """
    settings = settings.model_copy(update={"method": "lora"})
    tokenizer, config, meta = _open(settings)
    run = None
    if run_file is not None:
        run, strategy = read_run(run_file)
        run = run.model_copy(update={"model_name_or_path": settings.model_name_or_path})
    if read:
        assert run is not None and run_file is not None
        tokenizer.chat_template = resolve_template(tokenizer, run.chat_template, run.chat_template_kwargs)
        stops = read_stop_tokens(run_file)
    else:  # the adapter's folder has the tokenizer of its run, with its template
        stops = read_stops(Path(settings.adapter_name_or_path or ""), tokenizer)
    loader = auto_class(config)
    dtype = wanted.dtype or "bfloat16"
    rows = find_rows(run, tokenizer, wanted.rows, num_rows(meta))
    plan = LoadPlan(compute_dtype=dtype, device="cpu")  # type: ignore[arg-type]  # float16 too: nothing trains
    adapted: Any = build_model(settings, config, plan)
    if read:
        read(adapted)
    check_learned(dict(adapted.named_parameters()))
    reference = score(adapted, rows)
    with adapters_off(adapted):
        learned = change_between(score(adapted, rows), reference).mean
    bound = wanted.bound(getattr(torch, dtype))
    if wanted.max_change is None:
        bound = min(bound, SHARE * learned)
    _cast_whole_modules(adapted)
    merged = adapted.merge_and_unload(safe_merge=True)
    merged.config.use_cache = True
    stops = new_stops(merged, stops)
    is_chat = bool(tokenizer.chat_template)
    if run is not None:
        state = state or state_of(run_file.parent)  # type: ignore[union-attr]
        card = model_card(run, strategy, state, is_chat, stops, loader.__name__, merged=dtype)
    else:
        card = card_without_run(settings, is_chat, stops, loader.__name__, merged=dtype)
    merged.save_pretrained(folder, max_shard_size=wanted.shard_bytes)
    copy_processor(folder, config)
    write_stops(folder, merged, stops)
    tokenizer.save_pretrained(folder)
    write_for_transformers_4(folder)
    (folder / "README.md").write_text(card + card_for_servers(merged), encoding="utf-8")
    give_usual_mode(folder)
    del adapted, merged
    gc.collect()
    say(*describe_stops(stops, str(wanted.output_dir)))
    return _checked(folder, settings, loader, run, tokenizer, rows, reference, bound, learned)


def _cast_whole_modules(adapted: Any) -> None:
    """Cast the modules that trained whole, in float32, to the dtypes of those that they take the place of."""
    from peft.utils import ModulesToSaveWrapper

    for wrapper in adapted.modules():
        if isinstance(wrapper, ModulesToSaveWrapper):
            for whole in wrapper.modules_to_save.values():
                for trained, own in zip(whole.parameters(), wrapper.original_module.parameters(), strict=True):
                    trained.data = trained.data.to(own.dtype)


def copy_model(settings: MethodSettings, run_file: Path | None, folder: Path, wanted: Wanted) -> Written:
    """Write a full model again, in another dtype or with other shards.

    Args:
        settings: open the model.
        run_file: ``run.json`` of its run; None: not known.
        folder: empty.

    Raises:
        UserError: the model cannot be opened.
        TrainingError: what was written is not what was opened.
    """
    tokenizer, config, meta = _open(settings)
    loader = auto_class(config)
    source = Path(settings.model_name_or_path)
    run = read_run(run_file)[0] if run_file else None
    rows = find_rows(run, tokenizer, wanted.rows, num_rows(meta))
    model = opener(settings, loader)(source)
    reference = score(model, rows)
    dtype = getattr(torch, wanted.dtype) if wanted.dtype else model.dtype
    model.to(dtype).save_pretrained(folder, max_shard_size=wanted.shard_bytes)
    copy_processor(folder, config)
    tokenizer.save_pretrained(folder)
    write_for_transformers_4(folder)
    (folder / "README.md").write_text(card_of_folder(settings, tokenizer, loader), encoding="utf-8")
    give_usual_mode(folder)
    del model
    gc.collect()
    return _checked(folder, settings, loader, run, tokenizer, rows, reference, wanted.bound(dtype))


def open_model(settings: MethodSettings, run_file: Path | None, wanted: Wanted) -> Written:
    """Open a full model as it is, to make something else of it. The arguments are those of ``copy_model``."""
    tokenizer, config, meta = _open(settings)
    run = read_run(run_file)[0] if run_file else None
    rows = find_rows(run, tokenizer, wanted.rows, num_rows(meta))
    model = opener(settings, auto_class(config))(Path(settings.model_name_or_path))
    return Written(run, tokenizer, rows, model)


def card_of_folder(settings: MethodSettings, tokenizer: Any, loader: Any) -> str:
    """Return the card beside a full model; one that names what is known if there is none."""
    path = Path(settings.model_name_or_path) / "README.md"
    with suppress(OSError, ValueError):
        return durable.read_small(path)
    return card_without_run(settings, bool(tokenizer.chat_template), {}, loader.__name__, merged="")


def _checked(
    folder: Path,
    settings: MethodSettings,
    loader: Any,
    run: Recipe | None,
    tokenizer: Any,
    rows: Rows,
    reference: Scores,
    bound: float,
    learned: float | None = None,
) -> Written:
    lines, model = check_folder(folder, rows, tokenizer, reference, bound, opener(settings, loader), learned)
    say(*lines)
    return Written(run, tokenizer, rows, model)


def opener(settings: MethodSettings, loader: Any) -> Callable[[Path], Any]:
    """Return what opens a folder with plain transformers."""
    remote = {"trust_remote_code": True} if settings.trust_remote_code else {}
    return lambda folder: loader.from_pretrained(folder, dtype="auto", **remote)


def _check_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    """Return a line that says how many tensors of a written adapter are those that were trained, bit for bit.

    Raises:
        TrainingError: one is not there.
    """
    left = [tensor for path in folder.glob("*.safetensors") for tensor in load_file(path).values()]
    for name, tensor in tensors.items():
        if not any(each.shape == tensor.shape and torch.equal(each, tensor.to(each.dtype)) for each in left):
            raise TrainingError(f"the adapter that was written lacks {name}; nothing was kept")
    return f"adapter, opened again: {len(tensors)} of {len(tensors)} trained tensors are there, bit for bit"


def _open(settings: MethodSettings) -> tuple[Any, Any, Any]:
    """Open tokenizer, config and the model on meta, and check them before any weight is read."""
    config = open_config(settings)
    model = build_meta_model(settings, config)
    problems = check_model(settings, config, model)
    raise_if(replace(p, where="adapter") if p.where == "adapter_name_or_path" else p for p in problems)
    return open_tokenizer(settings), config, model


@contextmanager
def new_folder(output_dir: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to ``output_dir`` if the ``with`` block succeeds.

    If it fails, the temporary folder and parent folders created for it are deleted.

    Raises:
        UserError: the folder cannot be written.
    """
    staging = durable.staging_of(output_dir)
    made = [folder for folder in output_dir.parents if not os.path.exists(folder)]
    try:
        durable.make_afresh(staging)
        yield staging
        os.replace(staging, output_dir)
    except (OSError, SafetensorError) as error:
        raise UserError(Problem("--output_dir", f"{output_dir} cannot be written ({error})")) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        for folder in made:  # succeeds only for empty ones
            with suppress(OSError):
                folder.rmdir()
