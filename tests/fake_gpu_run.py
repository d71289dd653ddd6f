"""The simulation of ``fake_gpu.py``: the kit's own code on fake tensors. Imported once fake CUDA is loaded."""

import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from fake_cuda import stub_runtime
from fake_gpu import CONFIGS
from fake_gpu_meter import GpuMeter, GpuTally
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

import kit
from benchmarks.simulation.fake_run import FakeRun
from benchmarks.simulation.fake_tensors import teach_fake_tensors
from kit.config.command_line import read_command_line
from kit.evaluate import evaluate
from kit.strategy.launch import launch
from kit.tasks.objectives import build_objective
from kit.train.policy import Policy

# Whole paths: the folder of the clone may be called `kit` too.
KIT = f"{Path(kit.__file__).parent}/"


def run(case: Any) -> dict[str, Any]:
    """Run ``case`` and return the report. Changes torch and the kit in this process for good."""
    vocab_size = AutoConfig.from_pretrained(case.folder).get_text_config().vocab_size
    meter = GpuMeter(vocab_size, asked_by)
    stub_runtime(meter.waited, meter.pinned)
    teach_fake_tensors(meter)
    report: dict[str, Any] = {"case": asdict(case)}
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), meter:
            Simulation(case, meter, report).run()
    except Exception as error:
        report["error"] = "".join(traceback.format_exception(error))[-4000:]
    return report


class PaddedRun(FakeRun):
    """A run of which every other row is a quarter shorter, so that micro-batches are padded."""

    def sequence_lengths(self, num_samples: int, length: int) -> np.ndarray:
        """See ``FakeRun``."""
        lengths = super().sequence_lengths(num_samples, length)
        lengths.reshape(-1)[1::2] -= length // 4
        return lengths


class Simulation:
    """The run of ``recipes/finetune.py`` on rank 0, from the command line to an evaluation."""

    def __init__(self, case: Any, meter: GpuMeter, report: dict[str, Any]) -> None:
        self._case, self._meter, self._report = case, meter, report
        self._misplaced: dict[str, str] = {}

    def run(self) -> None:
        """Fill the report."""
        case, report = self._case, self._report
        flags = {
            "config": CONFIGS[case.topology],
            "model_name_or_path": case.folder,
            "dataset": "random",
            "method": case.method,
            "max_length": case.length,
            "packing": case.packing,
            "per_device_train_batch_size": case.rows,
            "global_batch_size": case.rows * case.world * case.micro_batches,
            "gradient_checkpointing": case.checkpointing,
            "fp8": case.fp8,
            "activation_offload": case.activation_offload,
            "objective": case.objective,
            "output_dir": tempfile.mkdtemp(),
        }
        recipe, topology = launch.resolve(read_command_line([f"--{name}={value}" for name, value in flags.items()]))
        if case.precompute_reference:
            recipe = recipe.model_copy(update={"precompute_reference": True})
        run = (PaddedRun if case.rows > 1 else FakeRun)(recipe, topology, self._meter)
        with self._tally("build"):
            compute_dtype = run.build()
        prepared = run.prepared
        self._check_weights(prepared, topology, getattr(torch, compute_dtype))

        self._step("first step", run, 1)
        one = self._step("step of 1 micro-batch", run, 1)
        many = self._step(f"step of {case.micro_batches} micro-batches", run, case.micro_batches)
        report["per micro-batch"] = {
            name: {
                key: (getattr(many, name)[key] - getattr(one, name)[key]) / (case.micro_batches - 1)
                for key in getattr(one, name) | getattr(many, name)
            }
            for name in ("syncs", "pageable", "products", "attention", "collectives", "collective_bytes")
        }
        samples = run.samples(case.micro_batches)
        objective = build_objective(recipe, samples.dataset_names)
        batch = run.batch(samples, case.micro_batches)
        with self._tally("passes without gradients"):
            objective.begin_step(prepared, batch)
        with self._tally("evaluation"):
            tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
            data = SimpleNamespace(evaluation=samples, mismatched=run.mismatched)
            policy = Policy(**vars(prepared), tokenizer=tokenizer)
            evaluate(policy, objective, data, recipe, lambda items, *_: items)

    def _step(self, name: str, run: FakeRun, num_micro_batches: int) -> GpuTally:
        with self._tally(name) as tally:
            run.step(num_micro_batches, before_update=lambda: self._check_gradients(run.prepared))
        self._check_optimizer(run.prepared)
        return tally

    @contextmanager
    def _tally(self, name: str) -> Iterator[GpuTally]:
        with self._meter.tally() as tally:
            yield tally
        self._report[name] = {key: value for key, value in vars(tally).items() if value}

    # --- what belongs where

    def _check_weights(self, prepared: Any, topology: Any, compute_dtype: torch.dtype) -> None:
        """Check the weights' devices and dtypes."""
        self._device = "cpu" if topology.strategy.offloads else "cuda"
        for name, parameter in prepared.model.named_parameters():
            self._expect(name, parameter, torch.float32 if parameter.requires_grad else compute_dtype)
        for name, buffer in prepared.model.named_buffers():
            if buffer.device.type != "cuda":
                self._misplaced[name] = f"a buffer on {buffer.device.type}"
        local = (getattr(p, "_local_tensor", p) for p in prepared.model.parameters() if p.requires_grad)
        on_gpu = not topology.strategy.offloads
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


def asked_by() -> str:
    """Return the innermost line of the kit that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(KIT):
        frame = frame.f_back
    return f"kit/{frame.f_code.co_filename.removeprefix(KIT)}:{frame.f_lineno}" if frame else "autograd"
