"""Offline distillation: cache the teachers' top-k log-probabilities before training.

P and Q are as in ``kit.tasks.distil.loss``, but over K + 1 outcomes: the teacher's K = ``teacher_top_k`` most probable
tokens, and one bucket for any other token. A divergence of these is at most that of all tokens (the data-processing
inequality of f-divergences: Csiszar 1967).

Promises:

- All ranks, and a run that continues, use the same numbers. Their key covers the content of the teacher's weight files
  (of a served one its name), the samples, and what else changes the numbers.
- A block of them is complete or absent in the cache, so a pass that was stopped goes on with its next block. One block
  at a time is in memory; the feed reads the targets of a step from memory maps.
- The teacher is not loaded if the cache has all blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache

from kit.data.feed.batches import Collator, MicroBatch, on_device, shares
from kit.data.feed.feed import GlobalBatch
from kit.data.open import pad_id
from kit.data.samples.samples import Samples
from kit.memory.sizes import format_bytes
from kit.model.build import attention_of, open_config
from kit.model.layers.chunks import chunk_size
from kit.model.teacher import own_teachers, teacher_settings
from kit.run.run import Run
from kit.strategy.accelerator import sum_over_ranks
from kit.strategy.processes.rendezvous import together
from kit.system.cache import cache_folder, digest, open_entry, store
from kit.system.console import say
from kit.system.errors import TrainingError
from kit.tasks.distil.served_teacher import ServedTeacher
from kit.tasks.distil.teacher import Teacher, open_teacher
from kit.train.precompute import hash_of, key_of_model, used_samples
from kit.train.reference import without_gradients

FOLDER = "teachers"  # of the cache
CODE_VERSION = 1  # part of every key: raise it whenever the same teacher would give other numbers
BLOCK_VALUES = 1 << 25  # tokens that a block holds for all its targets: each is 8 bytes
SERVED_VALUES = 1 << 20  # of a served teacher, which may be slow
_IDS, _LOGPS = "teacher_ids", "teacher_logps"  # of ``MicroBatch.per_target``: int32 [S, K], float32 [S, K + 1]


@dataclass(frozen=True)
class _Stored:
    """Numbers of all targets, in blocks of whole samples, as ``Table.attach`` takes them."""

    blocks: Sequence[np.ndarray]  # in order: [targets, W]
    bounds: np.ndarray  # int64 [blocks + 1]: the first target of each block
    starts: np.ndarray  # int64 [N]: the first target of each of ``samples`` among those of the chosen ones
    num_targets: np.ndarray  # int [N]

    def __getitem__(self, i: int) -> np.ndarray:
        block = int(np.searchsorted(self.bounds, self.starts[i], side="right")) - 1
        start = self.starts[i] - self.bounds[block]
        return self.blocks[block][start : start + self.num_targets[i]]


@dataclass(frozen=True)
class StoredTeacher:
    """The cached log-probabilities of the teacher, which are attached to the samples; used like ``Teacher``."""

    num_tokens: int  # K
    size: int  # tokens of both vocabularies
    first_logps: Sequence[np.ndarray]  # of each teacher, float32 [targets, W] of its first block

    def states(self, batch: GlobalBatch) -> GlobalBatch:
        """Return the batch, which has the teacher's log-probabilities."""
        return batch

    def compare(
        self, micro_batch: MicroBatch, logits: torch.Tensor, rows: slice, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See ``Teacher.compare``; the outcomes are K tokens, and any other one."""
        ids = micro_batch.per_target[_IDS][rows].long()
        of_student = logits[:, : self.size]
        agrees = of_student.argmax(dim=-1) == ids[:, 0]
        return micro_batch.per_target[_LOGPS][rows], outcomes(of_student, ids, temperature), agrees

    @property
    def description(self) -> str:
        """A line about how much of each teacher's probability is stored, measured on its first block."""
        held = [f"{np.exp(each[:, : self.num_tokens]).sum(axis=1).mean():.2%}" for each in self.first_logps]
        return (
            f"teacher: top-{self.num_tokens} log-probabilities of each target, and one bucket for the rest; "
            f"on {sum(map(len, self.first_logps))} targets the top {self.num_tokens} hold {', '.join(held)} of the "
            "probability"
        )


def _width(num_tokens: int, size: int) -> int:
    """How many outcomes there are: with the whole vocabulary there is no other token."""
    return num_tokens + (num_tokens < size)


def outcomes(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the log-probabilities of tokens, and of all others together if there are any, float32 [C, K + 1].

    Args:
        logits: float32 [C, V].
        ids: int64 [C, K].
    """
    logits = logits / temperature
    total = logits.logsumexp(dim=-1, keepdim=True)
    named = logits.gather(1, ids) - total
    if ids.shape[1] == logits.shape[1]:
        return named
    # Not 1 less their sum, of which rounding would leave nothing where the rest is small.
    rest = logits.scatter(1, ids, -torch.inf).logsumexp(dim=-1, keepdim=True) - total
    return torch.cat([named, rest], dim=1)


def store_teacher(run: Run) -> StoredTeacher:
    """Cache each teacher's log-probabilities of all targets that a step uses, unless they are. Called by all ranks.

    The teachers are gone from the device when this returns.

    Raises:
        UserError: the cache cannot be written, or a teacher's server fails for good.
        TrainingError: a probability is not a number.
    """
    checked, accelerator, samples = run.checked, run.accelerator, run.checked.data.train
    used = used_samples(checked.data, checked.total_steps)
    teachers = []
    for own, datasets in own_teachers(checked.recipe):
        if len(chosen := np.flatnonzero(used & np.isin(samples.dataset_ids, datasets))):
            settings = teacher_settings(own)
            teachers.append((own, settings, None if own.teacher_server else open_config(settings), chosen))
    sizes = [config.get_text_config().vocab_size for _, _, config, _ in teachers if config]
    size = min([checked.vocab_size, *sizes])
    k = min(checked.recipe.teacher_top_k, size)
    width = _width(k, size)
    order = np.concatenate([chosen for *_, chosen in teachers])
    ends = np.cumsum(samples.num_targets[order], dtype=np.int64)
    starts = np.zeros(len(samples), np.int64)
    starts[order] = ends - samples.num_targets[order]
    blocks: list[Any] = []
    bounds, firsts = [], []
    for own, settings, config, chosen in teachers:
        # Of whole samples, each with as many targets as fit.
        block_of = (starts[chosen] - starts[chosen[0]]) // max(1, (BLOCK_VALUES if config else SERVED_VALUES) // k)
        parts = np.split(chosen, np.flatnonzero(np.diff(block_of)) + 1)
        key: list[Any] = ["served", own.teacher]
        if config:
            key = key_of_model(accelerator, settings, attention_of(settings, config, own.packing))
        key = [CODE_VERSION, key, samples.fingerprint, own.distil_temperature, k, size]
        folders = [cache_folder() / FOLDER / digest(key, hash_of(part)) for part in parts]
        absent = [float(open_entry(folder) is None) for folder in folders]
        on_any = sum_over_ranks(torch.tensor(absent, device=accelerator.device))  # on one machine or more
        missing = torch.nonzero(on_any).flatten().tolist()
        num = int(samples.num_targets[chosen].sum())
        what = f"the top-{k} log-probabilities of {own.teacher} for {num} targets"
        if not missing:
            say(f"teacher: the cache has {what}")
        else:
            say(f"teacher: caching {what}, {format_bytes(num * 4 * (k + width))}")
            teacher: Teacher | ServedTeacher = (
                open_teacher(run, own) if config else ServedTeacher(own, checked.tokenizer, samples, k, size)
            )
            for number in missing:
                part = parts[number]
                values = _top_k(teacher, run, samples, part, starts - starts[part[0]], k, size)
                with together(accelerator):  # an error on one rank stops all ranks
                    if accelerator.is_local_main_process:
                        store(folders[number], values, {"teacher": own.teacher, "num_values": len(values[_IDS])})
            del teacher
            accelerator.free_memory()
            clear_device_cache(garbage_collection=True)  # the model is part of cycles
        entries = [open_entry(folder) for folder in folders]
        assert all(entries), "a block vanished from the cache"
        firsts.append(len(blocks))
        blocks += [entry[0] for entry in entries if entry]
        bounds += [starts[part[0]] for part in parts]
    for name, columns in ((_IDS, k), (_LOGPS, width)):
        of_name = [block[name].reshape(-1, columns) for block in blocks]
        stored = _Stored(of_name, np.array([*bounds, ends[-1]]), starts, samples.num_targets)
        samples.attach(name, stored, per="token")
    return StoredTeacher(k, size, [of_name[first] for first in firsts])


def _top_k(
    teacher: Teacher | ServedTeacher,
    run: Run,
    samples: Samples,
    chosen: np.ndarray,
    starts: np.ndarray,
    num_tokens: int,
    size: int,
) -> dict[str, np.ndarray]:
    """Return the teacher's top-k of the targets of the samples ``chosen``. Each rank computes its part.

    Args:
        starts: int64 [N], the first target of each of ``samples`` among those of the chosen ones.
        num_tokens, size: see ``StoredTeacher``.
    """
    recipe = run.checked.recipe
    num = int(samples.num_targets[chosen].sum())
    ids = torch.zeros(num, num_tokens, dtype=torch.int32)
    logps = torch.zeros(num, _width(num_tokens, size))
    if isinstance(teacher, ServedTeacher):
        with together(run.accelerator):
            if run.accelerator.is_main_process:
                for i, *found in run.progress(teacher.top_k(chosen), "teacher", len(chosen)):
                    of_sample = slice(starts[i], starts[i] + samples.num_targets[i])
                    ids[of_sample], logps[of_sample] = found
        ids, logps = sum_over_ranks(ids), sum_over_ranks(logps)
        return {_IDS: ids.numpy().reshape(-1), _LOGPS: logps.numpy().reshape(-1)}
    ranks, lengths, batch_size = teacher.prepared.ranks, samples.row_lengths, recipe.micro_batch_size
    collator = Collator(batch_size, pad_id(run.checked.tokenizer), packing=False, max_length=int(lengths.max()))
    own = list(shares(lengths, chosen, ranks, batch_size))
    with_bar = run.progress(own, "teacher", len(own))
    micro_batches = (collator.collate(samples, list(share[:, None])) for share in with_bar)
    chunk = chunk_size(teacher.vocab_size, 1, head_trains=False)
    with without_gradients(teacher.prepared):
        for micro_batch in on_device(micro_batches, teacher.prepared.accelerator.device):
            known = teacher.with_states(micro_batch)
            rows = [starts[i] + np.arange(samples.num_targets[i]) for _, _, i in micro_batch.segments]
            at = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *rows]))
            for start in range(0, len(at), chunk):
                some = slice(start, min(start + chunk, len(at)))
                logits = teacher.logits(known, some)[:, :size]
                best = logits.topk(num_tokens, dim=-1).indices
                ids[at[some]] = best.int().cpu()
                logps[at[some]] = outcomes(logits, best, recipe.distil_temperature).cpu()
    ids, logps = ranks.sum(ids), ranks.sum(logps)
    wrong = torch.nonzero(logps.isnan().any(dim=1))
    if len(wrong):
        first = np.searchsorted(starts[chosen], int(wrong[0]), side="right") - 1
        origin = samples.origin(int(chosen[first]))
        raise TrainingError(
            f"the teacher's log-probabilities of {len(wrong)} of {num} targets are NaN, first in {origin}"
        )
    return {_IDS: ids.numpy().reshape(-1), _LOGPS: logps.numpy().reshape(-1)}
