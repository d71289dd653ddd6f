"""Computes the reference's log-probabilities of all samples that a run uses before its first step, and caches them.

This is the way where the weights of the reference do not stay: in full training, and in an adapter that is trained on.

Promises:

- They are computed by the run's own model, under its own strategy and precision, with the weights it starts from.
- An entry of the cache is complete or absent. Its key covers the content of every weight file, the samples, and what
  else changes the numbers. All ranks use the same numbers, on each machine those of its own cache or newly computed.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kit.cache import Writer, cache_folder, cannot_write, digest, file_digest, locked, open_entry
from kit.console import say
from kit.data.feed.batches import Collator, SizedRows, on_device, shares
from kit.data.feed.stream import Stream
from kit.data.open import Data
from kit.errors import TrainingError
from kit.model.locate import ADAPTER_FILES, commit_of, open_adapter
from kit.run.record import versions
from kit.train.reference import sequence_logps, without_gradients

if TYPE_CHECKING:
    from kit.config.recipe import Recipe
    from kit.strategy.accelerator import Prepared

FOLDER = "references"  # of the cache
Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]


def add_references(
    prepared: "Prepared", recipe: "Recipe", data: Data | Stream, total_steps: int, pad_token_id: int, progress: Progress
) -> None:
    """Set ``Samples.references`` of the training and evaluation data. Called by all ranks, before the weights change.

    Args:
        total_steps: of the run: samples that no step uses are left out.
        progress: wraps the loop over batches.

    Raises:
        UserError: the cache cannot be written.
        TrainingError: a log-probability is not finite.
    """
    assert isinstance(data, Data), "a recipe that streams is refused"
    model = _key_of_model(prepared, recipe)
    used = np.unique(np.concatenate([i for step in range(total_steps) for i in data.order.batch(step)]))
    for samples, indices in ((data.train, used), (data.evaluation, None)):
        if samples is None:
            continue
        chosen = np.arange(len(samples)) if indices is None else indices
        mismatched = data.mismatched(samples)
        content = [samples.fingerprint, digest(chosen.tobytes().hex())]
        if mismatched is not None:
            content.append(digest(mismatched.partners.tobytes().hex()))
        folder = cache_folder() / FOLDER / digest(model, content)
        parts: list[SizedRows] = [samples] if mismatched is None else [samples, mismatched]
        num_columns = 2
        cached = _open(folder, len(samples) * num_columns)
        num_with = prepared.ranks.sum(torch.tensor(float(cached is not None), device=prepared.accelerator.device))
        if cached is None or num_with.item() < prepared.ranks.count:
            columns = [_logps(prepared, part, chosen, recipe.eval_batch_size, pad_token_id, progress) for part in parts]
            cached = np.concatenate(columns, axis=1).reshape(-1)
            _check(cached.reshape(len(samples), -1)[chosen], samples, chosen)
            if prepared.accelerator.is_local_main_process:
                _store(folder, cached, {"num_samples": len(chosen), "model": recipe.model_name_or_path})
        else:
            say(f"reference: log-probabilities of {len(chosen)} samples, from the cache")
        samples.references = cached.reshape(len(samples), num_columns)


def _key_of_model(prepared: "Prepared", recipe: "Recipe") -> list[Any]:
    """What of the model changes its log-probabilities by more than another order of sums."""
    commit = commit_of(recipe.model_name_or_path, recipe.model_revision)
    folder = Path(os.path.expanduser(recipe.model_name_or_path))
    files = [] if commit else [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    if recipe.adapter_name_or_path:
        adapter = open_adapter(recipe.adapter_name_or_path)
        files += [adapter / name for name in ADAPTER_FILES]
    weights = [commit, *(file_digest(path) for path in files)]
    plain: Any = prepared.accelerator.unwrap_model(prepared.model)
    used = versions()
    return [
        1,  # raise it whenever the same model would give other numbers
        weights,
        [recipe.new_tokens, recipe.seed] if recipe.new_tokens else None,  # rows that the files do not have
        recipe.method,
        prepared.accelerator.mixed_precision,
        torch.get_float32_matmul_precision(),
        prepared.accelerator.device.type,
        plain.config.get_text_config()._attn_implementation,
        [used[name] for name in ("torch", "transformers", "peft", "bitsandbytes")],
    ]


def _logps(
    prepared: "Prepared",
    samples: SizedRows,
    chosen: np.ndarray,
    batch_size: int,
    pad_token_id: int,
    progress: Progress,
) -> np.ndarray:
    """Compute the log-probabilities of the samples ``chosen``, float64 [N, sequences each]; 0 of the others.

    Each rank computes its share, and all get the whole.
    """
    collator = Collator(batch_size, pad_token_id, packing=False)
    device, ranks = prepared.accelerator.device, prepared.ranks
    own = list(shares(samples.row_lengths, chosen, ranks, batch_size))
    with_bar = progress(range(len(own)), "reference", len(own))
    micro_batches = (collator.collate(samples, list(own[i][:, None])) for i in with_bar)
    computed = []
    with without_gradients(prepared):
        for micro_batch in on_device(micro_batches, device):
            computed.append(sequence_logps(prepared.model(**micro_batch.model_inputs()), micro_batch))
    indices = np.concatenate(own)
    values = torch.cat(computed).cpu().numpy().reshape(len(indices), -1)
    whole = np.zeros((len(samples.lengths), values.shape[1] if len(indices) else len(samples.sequences(0))))
    whole[indices] = values
    return ranks.sum(torch.from_numpy(whole)).numpy()


def _check(values: np.ndarray, samples: Any, chosen: np.ndarray) -> None:
    wrong = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(wrong):
        origins = ", ".join(samples.origin(int(i)) for i in chosen[wrong[:3]])
        raise TrainingError(
            f"the reference gives no finite log-probability to {len(wrong)} of {len(chosen)} samples, first {origins}\n"
            "    -> fix or remove them, or train with another mixed_precision"
        )


def _open(folder: Path, num: int) -> np.ndarray | None:
    """The values of an entry of the cache, float64 [num]; None if there is none."""
    entry = open_entry(folder)
    if entry is None:
        return None
    values = entry[0].get("references")
    return values if values is not None and values.dtype == np.float64 and len(values) == num else None


def _store(folder: Path, values: np.ndarray, about: dict[str, Any]) -> None:
    with locked(folder), cannot_write(folder.parent):
        if open_entry(folder) is None:
            writer = Writer(folder)
            try:
                writer.append({"references": values})
                writer.finish({"about": about})
            except BaseException:
                writer.discard()
                raise
