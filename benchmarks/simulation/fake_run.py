"""The kit's own run on fake tensors: rank 0 of any number of GPUs, from loading the model to a step.

    python -m benchmarks.simulation.fake_run < request.json    # what ``benchmarks.simulation.simulate`` starts

The recipe, the topology, Accelerate, adapters, loss head, optimiser, sharding, feed and ``train_step`` are the run's.
These are replaced: reading weights (they are made by shape), the process group (torch's fake one), and threads, since a
dispatch mode is of its thread. It changes torch and the kit in its process for good.
"""

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import bitsandbytes  # noqa: F401  before CUDA seems to be there: it would look for its kernels
import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import kit.checkpoint.save
import kit.data.feed.feed
import kit.model.layers.lora_linear
import kit.model.layers.sequence_parallel
import kit.strategy.accelerator
from benchmarks.simulation.fake_tensors import (
    keep_inputs_on_host,
    offload_to_host,
    take_kernels_of_cuda,
    teach_fake_tensors,
)
from benchmarks.simulation.gradients import all_gradients
from benchmarks.simulation.images import encoder_inputs, keep_integers, placeholder_id, token_inputs
from benchmarks.simulation.labels import label_frozen, label_storages
from benchmarks.simulation.meter import FLOPS, Meter, Tally
from benchmarks.simulation.simulate import set_rank_0_variables
from benchmarks.simulation.storages import GRADIENTS
from kit.config.recipe import Recipe
from kit.data.feed.feed import Feed, GlobalBatch
from kit.data.feed.mismatched import Mismatched
from kit.data.feed.order import Order
from kit.data.kinds.answers import ANSWER_ROWS
from kit.data.kinds.kind import RowKind
from kit.data.kinds.kinds import kind_of
from kit.data.kinds.preference import PreferenceRows
from kit.data.kinds.unpaired_preference import UnpairedPreferenceRows
from kit.data.samples.records import Table
from kit.memory.families import shape_of
from kit.memory.shape import Tower
from kit.model.build import attention_of, build_model, build_teacher, open_config
from kit.model.teacher import teacher_settings
from kit.strategy.gradients import hold_in_float32, trains_in_bf16
from kit.strategy.strategies import SINGLE, Strategy
from kit.strategy.topology import Topology
from kit.system.console import guard_libraries, show_error, silence_libraries
from kit.tasks.distil.loss import Distillation
from kit.tasks.distil.teacher import Teacher
from kit.tasks.objectives import build_objective
from kit.train.optim.optim import build_optimizer
from kit.train.step import before_first_step, seed_everything, train_step


class RandomSamples(Table):
    """Samples of random ids, as the feed and the evaluation read them.

    Every token is supervised, so that the loss head gets as many targets as it may. Of each other answer with a label,
    the label is true.

    Attributes:
        image_tokens: of each row, if ``model`` reads images, with the encoder ``tower``.
    """

    image_tokens = 0
    model: Any = None
    tower: Any = None

    def __init__(self, sequence_lengths: np.ndarray, vocab_size: int, kind: RowKind = ANSWER_ROWS) -> None:
        """
        Args:
            sequence_lengths: int [N, 2] of pairs, [N, 1] of other samples.
            kind: what the samples are.
        """
        given = np.asarray(sequence_lengths, np.int32)
        lengths = given.sum(axis=1, dtype=np.int32)
        num_targets = lengths - given.shape[1]  # no token before the first one predicts it
        records = {"length": lengths, "num_targets": num_targets, "target_weight": num_targets.astype(np.float64)}
        super().__init__(records, np.zeros(len(lengths), np.int16), kind)
        self.sequence_lengths = given
        labels = np.arange(len(lengths)) % 2 == 0
        span = [np.ones(len(lengths)), given[:, 0]]
        of_kind = {PreferenceRows: [given[:, 0] - 1], UnpairedPreferenceRows: [np.ones(len(lengths)), labels]}
        self.values = np.stack([*span, *of_kind.get(type(kind), [])], axis=1).astype(np.float64)
        self.stores = [None]
        self.dataset_names = ["random"]
        self._vocab_size = vocab_size

    def with_references(self) -> "RandomSamples":
        """Set log-probabilities as if they had been computed before the first step, and return these samples."""
        self.attach("references", np.zeros((len(self), 2)), per="sequence")
        return self

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and weights of sample ``i``."""
        ids = np.random.default_rng(i).integers(self._vocab_size, size=self.lengths[i])
        if self.model is not None and self.image_tokens:
            ids[: self.image_tokens] = placeholder_id(self.model.config)
        return ids, np.ones(len(ids), np.float32)

    def media_inputs(self, input_ids: np.ndarray, segments: Any) -> dict[str, Any]:
        """See ``Table``."""
        if not self.image_tokens:
            return {}
        rows = len(input_ids)
        inputs = encoder_inputs(self.model.config, self.tower, rows, self.image_tokens)
        return {"encoder_inputs": inputs, "token_inputs": token_inputs(self.model, input_ids.shape)}

    def origin(self, i: int) -> str:
        """Return a name for sample ``i``."""
        return f"random:{i}"


class AtOnce:
    """An executor that works in the calling thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def submit(self, work: Any, *args: Any, **kwargs: Any) -> Future[Any]:
        """Do ``work`` now."""
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class FakeRun:
    """A run on rank 0. Use it inside ``FakeTensorMode`` and the meter."""

    def __init__(
        self,
        recipe: Recipe,
        topology: Topology,
        meter: Meter,
        device_memory: int | None = None,
        image_tokens: int = 0,
        tower: Tower | None = None,
    ) -> None:
        """
        Args:
            device_memory: bytes of the GPU for which the CPU device stands; None: it stands for none.
            image_tokens: of each row, which stand for an image.
            tower: that encodes it.
        """
        self._tower = tower
        self._device_memory = device_memory
        self._image_tokens = image_tokens
        self._recipe, self._topology, self._meter = recipe, topology, meter
        self._buckets_are_rebuilt = False
        kit.strategy.accelerator.join_group = lambda *_: dist.init_process_group(
            "fake", store=FakeStore(), rank=0, world_size=topology.num_processes
        )
        size = topology.sequence_parallel_size
        # Of targets in all places, which fake tensors do not know, each process has its share.
        kit.model.layers.sequence_parallel.indices = lambda mask: torch.arange(len(mask) // size)
        kit.data.feed.feed.ThreadPoolExecutor = kit.checkpoint.save.ThreadPoolExecutor = AtOnce  # type: ignore[misc, assignment]

    def build(self) -> str:
        """Build what a run builds before its first step. Returns the compute dtype."""
        recipe, topology, config = self._recipe, self._topology, open_config(self._recipe)
        self.vocab_size = config.get_text_config().vocab_size
        attention_of(recipe, config, recipe.packing)
        accelerator, plan = kit.strategy.accelerator.start(recipe, topology)
        plan = replace(plan, device_memory=self._device_memory or plan.device_memory)
        model = build_model(
            recipe,
            config,
            plan,
            packing=recipe.packing,
            seed=recipe.seed,
            router_aux_loss_coef=recipe.router_aux_loss_coef,
        )
        self._base = model.get_base_model() if hasattr(model, "get_base_model") else model
        optimizer = build_optimizer(model, recipe, recipe.peak_learning_rate, recipe.seed)
        self.prepared = kit.strategy.accelerator.prepare(accelerator, topology, model, optimizer)
        del model, optimizer
        label_storages(self._meter, self.prepared)
        self.teacher = self._teacher(accelerator, plan) if recipe.teacher else None
        return plan.compute_dtype

    def _teacher(self, accelerator: Any, plan: Any) -> Teacher:
        settings = teacher_settings(self._recipe)
        model = build_teacher(settings, open_config(settings), plan, self._recipe.packing)
        teacher = Teacher(kit.strategy.accelerator.prepare(accelerator, self._topology, model))
        label_frozen(self._meter, teacher.prepared.model, "teacher")
        return teacher

    def samples(self, num_micro_batches: int) -> RandomSamples:
        """Return samples that fill ``num_micro_batches`` on every rank; if the recipe packs, with four in each pack."""
        recipe = self._recipe
        num_items = recipe.micro_batch_size * self._topology.num_data_ranks * num_micro_batches
        num, length = (4 * num_items, recipe.max_length // 4) if recipe.packing else (num_items, recipe.max_length)
        samples = RandomSamples(self.sequence_lengths(num, length), self.vocab_size, kind_of(recipe))
        samples.image_tokens, samples.model, samples.tower = self._image_tokens, self._base, self._tower
        return samples.with_references() if recipe.precomputes_reference else samples

    def sequence_lengths(self, num_samples: int, length: int) -> np.ndarray:
        """Return the tokens of each sequence of ``num_samples`` samples, int [N, sequences of a sample]."""
        return np.full((num_samples, 2 if self._recipe.declared.rows == "preference" else 1), length)

    def mismatched(self, samples: RandomSamples) -> Mismatched | None:
        """Return the answers to other prompts that belong to ``samples``, as ``kit.data.open.Data`` does."""
        return Mismatched(samples, 0, self._recipe.max_length) if samples.kind.has_mismatched else None  # type: ignore[arg-type]

    def prime(self, accumulates: bool) -> None:
        """Make the optimiser's state as a first step does, and gradients as micro-batches before the next one do.

        Not for DDP, whose gradients lie in its buckets.

        Args:
            accumulates: whether the next micro-batch is not the first of its step.
        """
        model, optimizer = self.prepared.model, self.prepared.optimizer
        assert optimizer is not None
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        if not accumulates:
            optimizer.zero_grad()
        elif trains_in_bf16(model):
            hold_in_float32(model)
        self._meter.hold(all_gradients(model), GRADIENTS)
        self._buckets_are_rebuilt = True

    def step(self, num_micro_batches: int, before_update: Callable[[], None] = lambda: None) -> None:
        """Do a step of ``num_micro_batches`` on every rank.

        Args:
            before_update: called when all gradients are there.
        """
        recipe, prepared, samples = self._recipe, self.prepared, self.samples(num_micro_batches)
        batch = self.batch(samples, num_micro_batches)
        before_first_step(prepared, batch)
        seed_everything(0, 0, 0)
        objective = build_objective(recipe, samples.dataset_names)
        if isinstance(objective, Distillation):
            objective.teacher = self.teacher
        train_step(prepared, objective, batch, 1e-4, 1.0, before_update=before_update)

    def batch(self, samples: RandomSamples, num_micro_batches: int) -> GlobalBatch:
        """Return a global batch of ``samples``, of ``num_micro_batches`` on every rank."""
        recipe = self._recipe
        size = recipe.micro_batch_size * self._topology.num_data_ranks * num_micro_batches
        recipe = recipe.model_copy(update={"global_batch_size": size})
        capacity = recipe.max_length * samples.sequence_lengths.shape[1] if recipe.packing else None
        order = Order(samples.lengths, samples.dataset_ids, 0, size, capacity=capacity)
        given: Any = samples
        size, mismatched = recipe.micro_batch_size, self.mismatched(samples)
        return Feed(given, order, recipe, size, self.prepared.ranks, 0, 1, mismatched).take(0)


def main() -> None:
    """Read a request from standard input, and write the tallies of its steps to standard output, as JSON."""
    began = time.perf_counter()
    request = json.load(sys.stdin)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    guard_libraries()
    silence_libraries()
    recipe = Recipe(**request["recipe"], output_dir=tempfile.gettempdir())
    values = request["topology"]
    own = {"strategy": Strategy(**values["strategy"]), "layer_classes": tuple(values["layer_classes"])}
    topology = Topology(**values | own)
    if topology.strategy != SINGLE:
        set_rank_0_variables(topology.num_processes, request["gpus_per_machine"])
    FLOPS[torch.ops.kit.add_product_] = lambda sums, left, right, *_, **__: 2 * left.numel() * right.shape[-1]
    meter = Meter(open_config(recipe).get_text_config().vocab_size)
    teach_fake_tensors(meter)
    take_kernels_of_cuda()
    keep_inputs_on_host(meter)
    if topology.strategy.offloads:
        offload_to_host(meter)
    tower = None
    if request["image_tokens"]:
        tower = shape_of(open_config(recipe).to_dict(), "simulated").tower
        keep_integers()
    steps: list[Tally] = []

    def say(what: str) -> None:
        show_error(f"simulation: {what} after {time.perf_counter() - began:.1f} s")

    answer: dict[str, Any] = {}
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), meter:
            run = FakeRun(recipe, topology, meter, request["device_memory"], request["image_tokens"], tower)
            with meter.on_host() if topology.strategy.offloads else nullcontext():
                run.build()
                say("model built")
                if request["primes"]:
                    run.prime(request["accumulates"])
                    say("optimiser state made")
            for num_micro_batches in request["steps"]:
                with meter.tally() as tally:
                    run.step(num_micro_batches)
                steps.append(tally)
                say(f"step of {num_micro_batches} done")
        answer["steps"] = [vars(tally) for tally in steps]
    except Exception as error:
        show_error(traceback.format_exc())
        answer["error"] = f"{type(error).__name__}: {str(error)[:500]}"
    json.dump(answer, output)
    output.close()
    os._exit(0)  # the interpreter's own end would free fake storages in an order that crashes


if __name__ == "__main__":
    main()
