"""Write a model folder, GGUF files or quantised weights from a source. Runs in one process.

Promises: a model is checked before any weight is read; what was written is opened again, and is the model that was
trained (see ``proof.py``), or nothing is left. An adapter is merged into its unquantised base, never into 4 bits.
"""

import gc
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from kit.checkpoint.load import read_weights
from kit.export import compressed, gguf
from kit.export.card import converted_card
from kit.export.final import (
    MAX_SHARD_BYTES,
    Pixels,
    check_trained,
    copy_processor,
    describe_serving,
    finish_folder,
    give_usual_mode,
    write_model,
)
from kit.export.proof import (
    BOUNDS,
    FRACTION,
    Scores,
    change_between,
    check_folder,
    check_tokenizer,
    describe_agreement,
    find_calibration,
    score,
)
from kit.export.source import Source
from kit.export.stop_tokens import describe_stops, new_stops, open_generation_config, read_stops
from kit.model.adapters.adapter import adapters_off, attach_adapter
from kit.model.adapters.qat import check_layers, layers
from kit.model.adapters.targets import linear_names
from kit.model.build import build_model
from kit.model.load_plan import LoadPlan
from kit.model.pretrained.dequantise import class_that_dequantises
from kit.model.pretrained.heads import head_of, pad_with
from kit.strategy.weights import whole_state
from kit.system import durable
from kit.system.console import announce_wait, say
from kit.system.errors import TrainingError, UserError, raise_if


@dataclass(frozen=True)
class Wanted:
    """How a model is written."""

    dtype: str | None  # of the weights; None: that of the base
    max_change: float | None = None  # nats per token; None: ``BOUNDS``, and of a merge ``FRACTION``
    output_dir: Path = Path("model")  # for messages: what is written has another name until it is complete
    merges: bool = False  # the adapter of a checkpoint too

    def bound(self, dtype: torch.dtype) -> float:
        """Return the bound of what an opened model may differ by."""
        return self.max_change or BOUNDS[str(dtype)[6:]]


def write_folder(source: Source, folder: Path, wanted: Wanted) -> tuple[str, Any]:
    """Write an empty folder that ``from_pretrained`` opens, and compare it.

    Returns what it is, and the model as plain transformers opened it; None for an adapter.

    Raises:
        UserError: a model cannot be opened, or does not fit.
        TrainingError: the adapter was not trained, or what was written is not what was trained.
    """
    if source.checkpoint and source.settings.method == "full":
        return f"model after step {source.state.step}", _write_full(source, folder, wanted)
    if source.checkpoint and not wanted.merges:
        _write_adapter(source, folder, wanted)
        return f"adapter after step {source.state.step}", None
    if (run := source.run) and run.qat:
        flags = f"--output_dir quantized --format compressed-tensors {compressed.flags_of_qat(run)}"
        say(
            "note: this run trained on a quantised base (QAT), and the merge uses the original one, so the model "
            "differs from what was trained. Instead, serve the adapter on the quantised base: "
            f"`kit export {run.model_name_or_path} {flags}`"
        )
    return "merged model", _write_merged(source, folder, wanted)


def _write_full(source: Source, folder: Path, wanted: Wanted) -> Any:
    """Write the full model of a checkpoint: what ``final/`` would be after its step."""
    stops = _stops_of_run(source)
    _choose_padding(source)
    announce_wait("reading the weights")
    model = build_model(source.settings, source.config, LoadPlan(compute_dtype="float32", device="cpu"))
    read_weights(model, source.checkpoint)  # type: ignore[arg-type]
    reference = score(model, source.rows)
    dtype = getattr(torch, wanted.dtype) if wanted.dtype else source.config.dtype or torch.float32
    card = source.card(stops=stops)
    write_model(folder, model, whole_state(model), source.tokenizer, card, dtype, stops, _pixels(source))
    del model
    return _checked(source, folder, wanted, stops, reference, wanted.bound(dtype))


def _write_adapter(source: Source, folder: Path, wanted: Wanted) -> None:
    """Write the adapter of a checkpoint. Nothing of the base is written, so only its shapes are needed."""
    stops = _stops_of_run(source)
    _choose_padding(source)
    model = attach_adapter(source.meta_model, source.settings)
    tensors = read_weights(model, source.checkpoint)  # type: ignore[arg-type]
    card = source.card(stops=stops, dequantised_by=class_that_dequantises(source.config))
    write_model(folder, model, tensors, source.tokenizer, card, None, stops, _pixels(source))
    left = [tensor for path in folder.glob("*.safetensors") for tensor in load_file(path).values()]
    for name, tensor in tensors.items():
        if not any(each.shape == tensor.shape and torch.equal(each, tensor.to(each.dtype)) for each in left):
            raise TrainingError(f"the adapter that was written lacks {name}; nothing was written")
    say(*describe_stops(stops, str(wanted.output_dir)), *describe_serving(model, wanted.output_dir))
    say(*check_tokenizer(folder, source.rows, source.tokenizer))
    say(f"adapter, opened again: {len(tensors)} of {len(tensors)} trained tensors are there, bit for bit")


def _choose_padding(source: Source) -> None:
    """Choose a pad token that ends no text, for a model with a classification or embedding head."""
    if head_of(source.config) != "lm":
        pad_with(source.tokenizer, {row[-1] for row in source.rows.ids})


def _pixels(source: Source) -> Pixels:
    """The limits of the run for images, if it is known."""
    return (source.run.min_pixels, source.run.max_pixels) if source.run else (None, None)


def _stops_of_run(source: Source) -> dict[str, int]:
    open_generation_config(source.settings, source.meta_model)
    return new_stops(source.meta_model, source.texts.stop_tokens)


def _write_merged(source: Source, folder: Path, wanted: Wanted) -> Any:
    """Merge an adapter into its base, in the wanted dtype, and write a plain model."""
    dtype = wanted.dtype or str(source.config.dtype or torch.float32)[6:]
    rows = source.rows  # which checks the files, before any weight is read
    plan = LoadPlan(compute_dtype=dtype, device="cpu")  # type: ignore[arg-type]  # float16 too: nothing trains
    announce_wait("reading the weights")
    adapted: Any = build_model(source.settings, source.config, plan)
    if source.checkpoint:
        read_weights(adapted, source.checkpoint)
    check_trained(dict(adapted.named_parameters()))
    reference = score(adapted, rows)
    with adapters_off(adapted):
        adapter_change = change_between(score(adapted, rows), reference).mean
    bound = wanted.bound(getattr(torch, dtype))
    if wanted.max_change is None:
        bound = min(bound, FRACTION * adapter_change)
    announce_wait("merging and writing the model")
    _cast_whole_modules(adapted)
    merged = adapted.merge_and_unload(safe_merge=True)
    merged.config.use_cache = True
    _choose_padding(source)
    if head_of(merged.config) == "scores":
        merged.config.pad_token_id = source.tokenizer.pad_token_id
    known = source.texts.stop_tokens
    if not source.checkpoint:
        known = read_stops(Path(source.settings.adapter_name_or_path or ""), source.tokenizer)
    stops = new_stops(merged, known)
    merged.save_pretrained(folder, max_shard_size=MAX_SHARD_BYTES)
    copy_processor(folder, source.config, _pixels(source))
    finish_folder(folder, merged, source.tokenizer, source.card(stops=stops, merged=dtype), stops)
    del adapted, merged
    return _checked(source, folder, wanted, stops, reference, bound, adapter_change)


def _cast_whole_modules(adapted: Any) -> None:
    """Cast fully fine-tuned modules (PEFT's modules_to_save), in float32, to the dtypes of the originals."""
    from peft.utils import ModulesToSaveWrapper

    for wrapper in adapted.modules():
        if isinstance(wrapper, ModulesToSaveWrapper):
            wrapper.modules_to_save.to(next(wrapper.original_module.parameters()).dtype)


def _checked(
    source: Source,
    folder: Path,
    wanted: Wanted,
    stops: dict[str, int],
    reference: Scores,
    bound: float,
    adapter_change: float | None = None,
) -> Any:
    """Compare what was written with the ``reference``, and return it as plain transformers opened it."""
    gc.collect()  # the model that was written
    say(*describe_stops(stops, str(wanted.output_dir)))
    announce_wait("comparing what was written")
    model = _open_plain(source, folder)
    say(*check_folder(folder, model, source.rows, source.tokenizer, reference, bound, adapter_change))
    return model


def _open_plain(source: Source, folder: Path, dtype: str | None = None) -> Any:
    how = {"dtype": dtype or "auto", "trust_remote_code": source.settings.trust_remote_code}
    return source.loader.from_pretrained(folder, **how)


def write_gguf_folder(source: Source, folder: Path, wanted: Wanted, tools: gguf.Tools, types: Sequence[str]) -> str:
    """Write GGUF files of ``types``, with a card, and compare them. Returns what they are.

    Raises:
        UserError: llama.cpp's converter does not know the model or its tokenizer.
        TrainingError: what was written is not what was trained.
    """
    work = folder / "work"
    gguf.check_tokenizer(tools, source.settings, source.config, source.tokenizer, work)
    plain, model, card = _write_plain(source, work, wanted)
    gguf.prepare_tokenizer(source.tokenizer, plain)
    reference = score(model, source.rows)
    del model
    gc.collect()
    files = gguf.write_gguf(tools, plain, folder, source.name, types)
    compared = []
    for type_, file in files.items():
        bound = wanted.max_change or gguf.BOUNDS[type_]
        lines = gguf.check_gguf(tools, file, source.rows, source.tokenizer, reference, bound)
        say(*lines)
        compared += lines
    shutil.rmtree(work)
    names = [file.name for file in files.values()]
    made = "Written by llama.cpp's converter. Comparison with the model in transformers:"
    commands = "\n".join(f"llama-server --jinja -m {name}" for name in names)
    card = converted_card(card, "gguf", made, compared, f"\n```bash\n{commands}\n```\n")
    (folder / "README.md").write_text(card, encoding="utf-8")
    return f"{', '.join(names)} of {source.name}"


def write_compressed_folder(
    source: Source, folder: Path, wanted: Wanted, python: Path, scheme: str, group_size: int | None
) -> tuple[str, Any]:
    """Write the model with weights quantised by llmcompressor, and compare it.

    Args:
        python: of llmcompressor's environment.
        scheme: one of ``compressed.SCHEMES``.
        group_size: weights that share a scale; None: the scheme's default.

    Returns:
        What it is, and the model as transformers opened it.

    Raises:
        UserError: it cannot be opened, or not be quantised so.
        TrainingError: llmcompressor fails, or what it wrote differs by more than the bound.
    """
    group_size = group_size or compressed.SCHEMES[scheme]
    raise_if(check_layers(source.meta_model, group_size, "--scheme"))
    # The weights of FP8_DYNAMIC are rounded to nearest, and its activations are scaled in use.
    rows = [] if scheme == "FP8_DYNAMIC" else find_calibration(source.run, source.tokenizer)
    if scheme == "NVFP4" and not rows:
        raise UserError(
            "--scheme", "NVFP4 measures activations on training rows, and there are none", fix="another one"
        )
    plain, model, card = _write_plain(source, folder / "work", wanted)
    del model  # llmcompressor loads it too, with the tokenizer
    source.tokenizer.save_pretrained(plain)
    gc.collect()
    asked = {
        "model": str(plain),
        "dtype": wanted.dtype or ("bfloat16" if scheme == "NVFP4" else "auto"),  # what opens NVFP4 computes in it
        "scheme": scheme,
        "group_size": group_size,
        "ignore": sorted(set(linear_names(source.meta_model)) - layers(source.meta_model).keys()),
        "rows": rows,
        "folder": str(folder),
    }
    announce_wait("quantising")
    compressed.quantise(python, plain.with_name("asked.json"), asked)
    source.tokenizer.save_pretrained(folder)
    announce_wait("comparing what was written")
    model, opened = _open_plain(source, plain, wanted.dtype), _open_plain(source, folder)
    reference = score(model, source.rows)
    bound = 0.4 if "4" in scheme else 0.1  # nats per token, by the bits of a weight: set by hand, not derived
    lines = check_folder(folder, opened, source.rows, source.tokenizer, reference, wanted.max_change or bound)
    lines += [describe_agreement(model, opened, source.rows)]
    say(*lines)
    shutil.rmtree(plain.parent)
    made = f"Quantised by llmcompressor as {scheme}, calibrated on {len(rows)} training rows, for vLLM."
    card = converted_card(
        card, "compressed-tensors", f"{made} In transformers: `pip install compressed-tensors`.", lines
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    give_usual_mode(folder)
    return f"{source.name} in {scheme}, calibrated on {len(rows)} rows", opened


def _write_plain(source: Source, work: Path, wanted: Wanted) -> tuple[Path, Any, str]:
    """Return the folder, in ``work``, of the plain model that something else is made of; the model; and its card."""
    plain = work / "plain"
    plain.mkdir(parents=True)
    if not source.is_model:
        _, model = write_folder(source, plain, wanted)
        return plain, model, durable.read_small(plain / "README.md")
    assert source.rows  # which checks the files, before any weight is read
    folder = Path(source.settings.model_name_or_path)
    for path in folder.iterdir():
        if path.is_file() and not path.name.startswith(("tokenizer", "chat_template")):
            os.symlink(path, plain / path.name)
    card = source.card()
    with suppress(OSError, ValueError):
        card = durable.read_small(folder / "README.md")
    return plain, _open_plain(source, folder, wanted.dtype), card


@contextmanager
def new_folder(output_dir: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to ``output_dir`` if the ``with`` block succeeds.

    If it fails, the temporary folder is deleted.

    Raises:
        UserError: the folder cannot be written.
    """
    staging = durable.staging_of(output_dir)
    try:
        durable.make_afresh(staging)
        yield staging
        os.replace(staging, output_dir)
    except (OSError, SafetensorError) as error:
        raise UserError("--output_dir", f"{output_dir} cannot be written ({error})") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
