"""Compute and cache the reference model's log-probabilities of all samples of a run, before its first step.

Needed where the weights of the initial policy change: in full fine-tuning, and if a saved adapter is trained further.

Promises:

- They are computed by the run's own model, under its own strategy and precision, with the weights it starts from.
- An entry of the cache is complete or absent. Its key covers the content of the weight files, the samples, and what
  else changes the numbers. All ranks use the same numbers.
"""

import os
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from kit.config.recipe import Recipe
from kit.data.feed.batches import Collator, on_device, shares
from kit.data.feed.data import Data
from kit.data.open import pad_id
from kit.data.samples.records import Table
from kit.data.samples.samples import Samples
from kit.model.pretrained.locate import ADAPTER_FILES, commit_of, open_adapter
from kit.strategy.weights import reshard
from kit.system.cache import cache_folder, digest, file_digest, open_entry, store
from kit.system.console import Progress, say
from kit.system.errors import TrainingError
from kit.train.reference import sequence_logps, without_gradients

if TYPE_CHECKING:
    from accelerate import Accelerator

    from kit.config.settings.method import MethodSettings
    from kit.train.policy import Policy

FOLDER = "references"  # of the cache
CODE_VERSION = 1  # part of every key: raise it whenever the same model would give other numbers


def add_references(policy: "Policy", recipe: Recipe, data: Data, total_steps: int, progress: Progress) -> None:
    """Attach ``references`` to the training and evaluation data. Called by all ranks, before the weights change.

    Args:
        total_steps: of the run: samples that no step uses are left out.
        progress: wraps the loop over batches.

    Raises:
        UserError: the cache cannot be written.
        TrainingError: a log-probability is not finite.
    """
    for samples, used in ((data.train, used_samples(data, total_steps)), (data.evaluation, None)):
        if samples is not None:
            add_reference(policy, recipe, data, samples, recipe.eval_batch_size, progress, used)


def add_reference(
    policy: "Policy",
    recipe: Recipe,
    data: Data,
    samples: Samples,
    batch_size: int,
    progress: Progress,
    used: np.ndarray | None = None,
) -> None:
    """Attach ``references`` to some samples of ``data``, and raise as ``add_references`` does. Called by all ranks.

    Args:
        recipe: of the model.
        batch_size: samples of a rank in a micro-batch.
        used: which samples are needed, bool [N]; None: all.
    """
    mismatched = data.mismatched(samples)
    chosen = np.arange(len(samples)) if used is None else np.flatnonzero(used)
    parts: list[Table] = [samples] if mismatched is None else [samples, mismatched]
    order = [chosen] if mismatched is None else [chosen, mismatched.partners]
    plain: Any = policy.accelerator.unwrap_model(policy.model)
    attention = plain.config.get_text_config()._attn_implementation
    model = key_of_model(policy.accelerator, recipe, attention, recipe.seed, policy.compiler is not None)
    folder = cache_folder() / FOLDER / digest(model, samples.fingerprint, [hash_of(each) for each in order])
    entry = open_entry(folder)
    values = np.array(entry[0]["references"]).reshape(len(samples), -1) if entry else None
    device = policy.accelerator.device
    if policy.ranks.sum(torch.tensor(float(values is None), device=device)).item():  # on one machine or more
        values = np.concatenate(
            [_logps(policy, part, chosen, batch_size, progress) for part in parts],
            axis=1,
        )
        _check(values, samples, chosen)
        if policy.accelerator.is_local_main_process:
            about = {"model": recipe.model_name_or_path, "num_samples": len(chosen)}
            store(folder, {"references": values.reshape(-1)}, about)
    else:
        say(f"reference model: the log-probabilities of {len(chosen)} samples are in the cache")
    assert values is not None
    samples.attach("references", values, per="sequence")


def used_samples(data: Data, total_steps: int) -> np.ndarray:
    """Return whether a step of the run uses each training sample, bool [N]."""
    used = np.zeros(len(data.train), bool)
    for step in range(total_steps):
        used[np.concatenate(data.order.batch(step))] = True
        if used.all():
            break
    return used


def key_of_model(
    accelerator: "Accelerator", settings: "MethodSettings", attention: str, seed: int = 0, compiled: bool = False
) -> list[Any]:
    """Return what changes a model's log-probabilities by more than rounding, for the cache key.

    Args:
        attention: see ``kit.model.build.attention_of``.
    """
    commit = commit_of(settings.model_name_or_path, settings.model_revision)
    folder = Path(os.path.expanduser(settings.model_name_or_path))
    files = [] if commit else [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    if settings.adapter_name_or_path:
        adapter = open_adapter(settings.adapter_name_or_path)
        files += [adapter / name for name in ADAPTER_FILES]
    return [
        CODE_VERSION,
        commit,
        [file_digest(path) for path in files],
        [settings.new_tokens, seed] if settings.new_tokens else None,  # rows that the files do not have
        settings.method,
        accelerator.mixed_precision,
        torch.get_float32_matmul_precision(),
        accelerator.device.type,
        attention,
        [metadata.version(name) for name in ("torch", "transformers", "peft")],
        *(["compiled"] if compiled else []),  # fused operations do not round in between
        *(["fp8"] if settings.fp8 else []),
        *([settings.experts_implementation] if settings.experts_implementation != "auto" else []),
        *([settings.qat, settings.qat_group_size] if settings.qat else []),
    ]


def hash_of(values: np.ndarray) -> str:
    """Return a hash of integers."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(values, np.int64).tobytes())


def _logps(policy: "Policy", samples: Table, chosen: np.ndarray, batch_size: int, progress: Progress) -> np.ndarray:
    """Compute the log-probabilities of the samples ``chosen``, float64 [N, sequences of a sample]; 0 of the others.

    Each rank computes its share, and all get the whole.
    """
    collator = Collator(batch_size, pad_id(policy.tokenizer), False, int(samples.row_lengths.max()))
    own = list(shares(samples.row_lengths, chosen, policy.ranks, batch_size))
    with_bar = progress(own, "reference", len(own))
    micro_batches = (collator.collate(samples, list(share[:, None])) for share in with_bar)
    computed = []
    with without_gradients(policy):
        for micro_batch in on_device(micro_batches, policy.accelerator.device):
            computed.append(sequence_logps(policy.model(**micro_batch.model_inputs()), micro_batch))
    reshard(policy.model)
    values = np.zeros((len(samples.row_lengths), len(samples.sequences(0))))
    values[np.concatenate(own)] = torch.cat(computed).cpu().numpy().reshape(-1, values.shape[1])
    return policy.ranks.sum(torch.from_numpy(values)).numpy()


def _check(values: np.ndarray, samples: Samples, chosen: np.ndarray) -> None:
    wrong = chosen[~np.isfinite(values[chosen]).all(axis=1)]
    if len(wrong):
        origins = ", ".join(samples.origin(int(i)) for i in wrong[:3])
        raise TrainingError(
            f"the reference model gives no finite log-probability to {len(wrong)} of {len(chosen)} samples, "
            f"first {origins}\n"
            "    -> fix or remove them, or train with another mixed_precision"
        )
