"""The simulation of ``fake_gpu.py``: the kit's own code on fake tensors. Imported once fake CUDA is loaded."""

import tempfile
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fake_cuda import stub_runtime
from fake_faults import FAULTS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

import kit.checkpoint.save
import kit.data.feed.feed
import kit.strategy.accelerator
import kit.train.objective
from kit.checkpoint.save import Saver
from kit.config.command_line import read_command_line
from kit.data.feed.feed import Feed
from kit.data.feed.order import Order
from kit.evaluate import evaluate
from kit.model.load import attention_of, build_model, open_config
from kit.plan.fake_tensors import teach_fake_tensors
from kit.plan.meter import GRADIENTS, Meter, Tally
from kit.strategy import launch
from kit.train.optim import build_optimizer
from kit.train.step import seed_everything, settle_strategy, train_step

OWN = ("/kit/",)
IGNORED = ("/tests/fake_gpu", "/tests/fake_cuda", "/kit/plan/", "runpy")


class Samples:
    """Samples of random ids, as the feed and the evaluation read them."""

    def __init__(self, num: int, length: int, vocab_size: int) -> None:
        self.lengths = np.full(num, length, np.int32)
        self.lengths[1::2] -= length // 4  # so that rows of a micro-batch are padded
        self.sources = np.zeros(num, np.int16)
        self.num_targets = self.lengths - 1
        self.target_weights = self.num_targets.astype(np.float64)
        self.stores, self.names, self._vocab_size = [None], ["random"], vocab_size

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        ids = np.random.default_rng(i).integers(self._vocab_size, size=self.lengths[i])
        return ids, np.ones(len(ids), np.float32)

    def origin(self, i: int) -> str:
        return f"random:{i}"


class AtOnce:
    """An executor that works in the calling thread: a dispatch mode is of its thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def submit(self, work: Any, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def run(case: Any) -> dict[str, Any]:
    """Run ``case`` and return the report. Changes torch and the kit in this process for good."""
    vocab_size = AutoConfig.from_pretrained(case.folder).get_text_config().vocab_size
    meter = Meter(vocab_size, OWN, IGNORED)
    stub_runtime(meter.waited, meter.pinned)
    teach_fake_tensors(meter)
    report: dict[str, Any] = {"case": asdict(case)}
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), meter:
            Simulation(case, meter, report).run(vocab_size)
    except Exception as error:
        report["error"] = describe(error)
    return report


class Simulation:
    """The run of ``recipes/finetune.py`` on rank 0, from the command line to a save."""

    def __init__(self, case: Any, meter: Meter, report: dict[str, Any]) -> None:
        self._case, self._meter, self._report = case, meter, report
        self._misplaced: dict[str, str] = {}

    def run(self, vocab_size: int) -> None:
        """Fill the report."""
        case, report = self._case, self._report
        kit.strategy.accelerator.join_group = lambda backend, timeout: dist.init_process_group(
            "fake", store=FakeStore(), rank=0, world_size=case.world
        )
        # The scenario's threads, since a dispatch mode is of its thread.
        kit.data.feed.feed.ThreadPoolExecutor = kit.checkpoint.save.ThreadPoolExecutor = AtOnce
        if case.fault:
            FAULTS[case.fault]()
        flags = {
            "config": case.config,
            "model_name_or_path": case.folder,
            "dataset": "random",
            "method": case.method,
            "max_length": case.length,
            "packing": case.packing,
            "per_device_train_batch_size": case.rows,
            "global_batch_size": case.rows * case.world * case.micro_batches,
            "gradient_checkpointing": case.checkpointing,
            "output_dir": tempfile.mkdtemp(),
        }
        recipe, topology = launch.resolve(read_command_line([f"--{name}={value}" for name, value in flags.items()]))
        config = open_config(recipe)
        attention_of(recipe, config)
        with self._tally("build"):
            accelerator, plan = kit.strategy.accelerator.start(recipe, topology)
            model = build_model(recipe, config, plan)
            optimizer = build_optimizer(model, recipe)
            prepared = kit.strategy.accelerator.prepare(accelerator, topology, model, optimizer)
            del model, optimizer
        self._watch(prepared, topology, getattr(torch, plan.compute_dtype))

        length = case.length // 4 if case.packing else case.length
        num_rows = case.rows * case.world * case.micro_batches
        samples = Samples(num_rows * (5 if case.packing else 1), length, vocab_size)
        one = self._step("first step", prepared, recipe, samples, 1)
        one = self._step("step of 1 micro-batch", prepared, recipe, samples, 1)
        many = self._step(f"step of {case.micro_batches} micro-batches", prepared, recipe, samples, case.micro_batches)
        report["per micro-batch"] = {
            name: {
                key: (getattr(many, name)[key] - getattr(one, name)[key]) / (case.micro_batches - 1)
                for key in getattr(one, name) | getattr(many, name)
            }
            for name in ("syncs", "pageable", "casts", "products", "attention", "collectives", "collective_bytes")
        }
        tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
        with self._tally("evaluation"):
            evaluate(prepared, recipe, tokenizer, samples, lambda items, *_: items)
        saver = Saver(prepared.accelerator, recipe, Path(recipe.output_dir or ""), {})
        saver._complete = lambda *args: None  # what follows the copies is for a disk
        for name in ("first save", "second save"):
            with self._tally(name):
                saver.save(prepared.model, prepared.optimizer, {"step": 1, "best": {}})

    def _step(self, name: str, prepared: Any, recipe: Any, samples: Samples, num_micro_batches: int) -> Tally:
        case = self._case
        size = case.rows * case.world * num_micro_batches
        recipe = recipe.model_copy(update={"global_batch_size": size})
        order = Order(samples.lengths, samples.sources, 0, size, capacity=case.length if case.packing else None)
        feed = Feed(samples, order, recipe, prepared.ranks, 0, 1)
        with self._tally(name) as tally:
            batch = feed.take(0)
            if name == "first step":
                settle_strategy(prepared, batch)
            seed_everything(0, 0, 0)
            objective = kit.train.objective.SupervisedLoss(samples.names)
            train_step(prepared, objective, batch, 1e-4, 1.0, before_update=lambda: self._check_gradients(prepared))
            label_optimizer(self._meter, prepared.optimizer)
        self._check_optimizer(prepared)
        return tally

    @contextmanager
    def _tally(self, name: str) -> Iterator[Tally]:
        with self._meter.tally() as tally:
            yield tally
        self._report[name] = {key: value for key, value in vars(tally).items() if value}

    # --- what belongs where

    def _watch(self, prepared: Any, topology: Any, compute_dtype: torch.dtype) -> None:
        """Check the weights' devices and dtypes, and label weights and gradients from now on."""
        self._device = "cpu" if topology.offload else "cuda"
        label_weights(self._meter, prepared.model)
        for name, parameter in prepared.model.named_parameters():
            self._expect(name, parameter, torch.float32 if parameter.requires_grad else compute_dtype)
        for name, buffer in prepared.model.named_buffers():
            if buffer.device.type != "cuda":
                self._misplaced[name] = f"a buffer on {buffer.device.type}"
        backward = prepared.accelerator.backward

        def labelling_backward(loss: torch.Tensor, **kwargs: Any) -> None:
            backward(loss, **kwargs)
            self._meter.hold(gradients(prepared.model), GRADIENTS)

        prepared.accelerator.backward = labelling_backward
        local = (getattr(p, "_local_tensor", p) for p in prepared.model.parameters() if p.requires_grad)
        on_gpu = not topology.offload
        self._report["gradient bytes"] = on_gpu * sum(4 * tensor.numel() for tensor in local)
        self._report["misplaced"] = self._misplaced

    def _check_gradients(self, prepared: Any) -> None:
        for name, parameter in prepared.model.named_parameters():
            if parameter.grad is not None:
                self._expect(f"gradient of {name}", parameter.grad, torch.float32)

    def _check_optimizer(self, prepared: Any) -> None:
        names = {parameter: name for name, parameter in prepared.model.named_parameters()}
        for parameter, state in prepared.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    self._expect(f"{key} of {names.get(parameter, '?')}", value, torch.float32)

    def _expect(self, name: str, tensor: Any, dtype: torch.dtype) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        if (local.device.type, local.dtype) != (self._device, dtype):
            self._misplaced[name] = f"{local.dtype} on {local.device.type}, expected {dtype} on {self._device}"


def gradients(model: Any) -> Iterator[Any]:
    """All gradients that exist, those that FSDP2 has not reduced among them."""
    for parameter in model.parameters():
        yield parameter.grad
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    yield parameter.unsharded_accumulated_grad
                    yield getattr(getattr(parameter, "_unsharded_param", None), "grad", None)


def label_weights(meter: Meter, model: Any) -> None:
    for parameter in model.parameters():
        meter.hold([parameter], "trainable weights" if parameter.requires_grad else "frozen weights")
    for module in model.modules():
        if (state := getattr(module, "quant_state", None)) is not None:
            tables = [value for part in (state, state.state2) for value in vars(part).values()]
            meter.hold([module.weight, *tables], "4-bit weights")
    meter.hold(model.buffers(), "buffers")


def label_optimizer(meter: Meter, optimizer: Any) -> None:
    for state in optimizer.state.values():
        meter.hold(state.values(), "optimiser")


def describe(error: BaseException) -> dict[str, Any]:
    frames = traceback.extract_tb((error.__context__ or error).__traceback__)
    lines = [f"{frame.filename.rsplit('site-packages/')[-1]}:{frame.lineno} {frame.line}" for frame in frames]
    return {
        "type": type(error).__name__,
        "message": str(error)[:500],
        "lines": [f"kit/{line.split('/kit/')[-1]}" for line in lines if "/kit/" in line][-3:],
        "trace": lines[-40:],
    }
