"""Turn a checkpoint of a run into a model folder, or merge an adapter into its base. Runs in one process.

Promises: the new folder is complete or absent; a model is checked before any weight is read.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from kit import durable
from kit.config.settings.method import MethodSettings
from kit.console import say
from kit.data.chat.template import resolve_template
from kit.errors import Problem, UserError, raise_if
from kit.export.card import model_card
from kit.export.final import check_learned, copy_processor, describe_serving, give_usual_mode, write_model
from kit.export.stops import describe_stops, new_stops, open_generation_config, read_stops, write_stops
from kit.model.adapter import attach_adapter
from kit.model.classes import auto_class
from kit.model.dequantise import class_that_dequantises
from kit.model.load import build_meta_model, build_model, check_model, open_config
from kit.model.plan import LoadPlan
from kit.model.tokenizer import open_tokenizer
from kit.run.record import read_run, read_stop_tokens
from kit.strategy.weights import whole_state
from kit.train.loop_state import LoopState

# Reads a checkpoint's weights into a model, and returns them by their names in it (``read_weights`` with its path).
Read = Callable[[Any], dict[str, torch.Tensor]]


def export_checkpoint(
    settings: MethodSettings, run_file: Path, state: LoopState, read: Read, output_dir: Path, dtype: str | None
) -> None:
    """Write a checkpoint as a model folder: what ``final/`` would be after its step. Runs in one process.

    Args:
        settings: open the model of the run, see ``with_model_of_run``.
        run_file: ``run.json`` of the run, for the card and the chat template.
        state: the state of the loop in the checkpoint.
        read: reads the checkpoint's weights.
        output_dir: new folder for the model.
        dtype: dtype of a full model's weights; None: that of its base.

    Raises:
        UserError: the base cannot be opened or does not fit the checkpoint, or ``output_dir`` cannot be written.
        TrainingError: the adapter has learned nothing.
    """
    run, strategy = read_run(run_file)
    run = run.model_copy(update={"model_name_or_path": settings.model_name_or_path})  # it may have moved
    tokenizer, config, model = _open(settings)
    open_generation_config(settings, model)
    stops = new_stops(model, read_stop_tokens(run_file))
    tokenizer.chat_template = resolve_template(tokenizer, run.chat_template, run.chat_template_kwargs)
    loader = auto_class(config).__name__
    dequantised_by = class_that_dequantises(config)
    card = model_card(run, strategy, state, bool(tokenizer.chat_template), stops, loader, dequantised_by)
    with _new_folder(output_dir) as folder:
        if settings.method == "full":
            model = build_model(settings, config, LoadPlan(compute_dtype="float32", device="cpu"))
            read(model)
            tensors = whole_state(model)
        else:  # nothing of the base is written, so only its shapes are needed
            model = attach_adapter(model, settings)
            tensors = read(model)
        write_model(folder, model, tensors, tokenizer, card, getattr(torch, dtype) if dtype else config.dtype, stops)
    say(*describe_stops(stops, str(output_dir)), *describe_serving(model, output_dir))


def merge_adapter(settings: MethodSettings, run_file: Path, read: Read | None, output_dir: Path, dtype: str) -> Any:
    """Merge an adapter into its unquantised base, never into 4-bit weights, and save a plain model.

    Args:
        settings: open the base with its adapter.
        run_file: ``run.json`` of the run of a checkpoint; not read for an adapter.
        read: reads a checkpoint into the adapter; None if ``settings`` open the trained adapter itself.
        output_dir: new folder for the model.
        dtype: dtype of the merged weights; the merge is computed in it too.

    Returns:
        The merged model.

    Raises:
        UserError: adapter or base cannot be opened, do not fit each other, or ``output_dir`` cannot be written.
        TrainingError: the adapter has learned nothing.
    """
    settings = settings.model_copy(update={"method": "lora"})
    tokenizer, config, _ = _open(settings)
    if read:
        run, _ = read_run(run_file)
        tokenizer.chat_template = resolve_template(tokenizer, run.chat_template, run.chat_template_kwargs)
        stops = read_stop_tokens(run_file)
    else:  # the adapter's folder has the tokenizer of its run, with its template
        stops = read_stops(Path(settings.adapter_name_or_path or ""), tokenizer)
    with _new_folder(output_dir) as folder:
        plan = LoadPlan(compute_dtype=dtype, device="cpu")  # type: ignore[arg-type]  # float16 too: nothing trains
        adapted: Any = build_model(settings, config, plan)
        if read:
            read(adapted)
        check_learned(dict(adapted.named_parameters()))
        merged = adapted.merge_and_unload(safe_merge=True)
        merged.config.use_cache = True
        merged.save_pretrained(folder)
        copy_processor(folder, config)
        write_stops(folder, merged, stops)
        tokenizer.save_pretrained(folder)
        give_usual_mode(folder)
    say(*describe_stops(new_stops(merged, stops), str(output_dir)))
    return merged


def _open(settings: MethodSettings) -> tuple[Any, Any, Any]:
    """Open tokenizer, config and the model on meta, and check them before any weight is read."""
    config = open_config(settings)
    model = build_meta_model(settings, config)
    problems = check_model(settings, config, model)
    raise_if(replace(p, where="adapter") if p.where == "adapter_name_or_path" else p for p in problems)
    return open_tokenizer(settings), config, model


@contextmanager
def _new_folder(output_dir: Path) -> Iterator[Path]:
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
