"""Out of memory: recognised wherever it comes from, counted as it is, with its place and what helps."""

import errno
import json
import re
import tracemalloc
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, run_ranks
from memory_helpers import GIB, ON_CPU, ON_GPU, fail, make, message_of, placed, raised
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kit.checkpoint import save as saver
from kit.checkpoint.save import Saver
from kit.config.conflicts import find_conflicts
from kit.config.recipe import Recipe
from kit.errors import TrainingError, UserError
from kit.memory import shortage
from kit.memory.formulas import FOUR_BIT, FROZEN, GRADIENTS, LOGITS, OPTIMISER, TRAINABLE, Memory
from kit.memory.shortage import COMPONENTS, components, explain
from kit.model.load import build_model, open_config
from kit.model.plan import LoadPlan
from kit.run.identity import identity
from kit.strategy import launch


def backward(model):
    mixed = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):  # as Accelerate has it in a run
        outputs = model(input_ids=torch.arange(3, 35)[None])
    outputs.logits.float().logsumexp(-1).sum().backward()


# --- what is recognised


def test_every_form_of_out_of_memory_is_recognised_also_as_the_cause_of_another_error():
    for error in (
        RuntimeError(ON_CPU),
        torch.OutOfMemoryError(ON_GPU),
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("Error out of memory at line 88 in file /src/csrc/ops.cu"),
        RuntimeError("unable to mmap 1073741824 bytes from file <m>: Cannot allocate memory (12)"),
    ):
        assert message_of(error).startswith("error: out of memory: in training\n"), error
        outer = TrainingError("rank 1")
        outer.__cause__ = error
        assert (str(error).splitlines() or ["MemoryError"])[0] in message_of(outer)


def test_other_errors_are_not_explained():
    for error in (
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("CUDA error: device-side assert triggered"),
        OSError(errno.ENOSPC, "No space left on device"),
        TrainingError("loss nan, gradient norm nan"),
        KeyError("out of memory"),
        KeyboardInterrupt(),
    ):
        assert explain(error, None, None, make(), placed()) is None, error


def test_weights_that_do_not_fit_are_no_mistake_in_the_models_name(model_folder, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    recipe = make(model_name_or_path=str(model_folder), method="lora")
    error = raised(build_model, recipe, open_config(recipe), LoadPlan(compute_dtype="float32", device="cpu"))
    assert not isinstance(error, UserError)
    text = message_of(error)
    assert text.startswith("error: out of memory: in loading\n")
    assert "--method qlora" in text


# --- where it happened


def broken(model, kind):
    """``model`` with the forward of its second module of a class failing."""
    module = [module for module in model.modules() if type(module).__name__ == kind][1]
    module.forward = type(module).forward.__get__(module)
    for child in module.children():
        child.register_forward_pre_hook(fail)
    return model


def test_the_module_and_the_pass_are_named(build):
    model, _ = build()
    assert "in the forward pass (LlamaMLP)\n" in message_of(raised(backward, broken(model, "LlamaMLP")))

    model, _ = build()
    model.model.layers[1].mlp.register_full_backward_hook(fail)
    assert "in the backward pass\n" in message_of(raised(backward, model))


def save_checkpoint(model, optimizer, folder, **settings):
    about = {"identity": {}, "strategy": {}, "versions": {}}
    saver = Saver(
        SimpleNamespace(process_index=0, num_processes=1), make(**settings), folder, about, timeout_seconds=1800
    )
    saver.save(model, optimizer, {"step": 1})
    return saver


def test_a_save_that_fails_is_named_whoever_met_the_limit(build, tmp_path, monkeypatch):
    """The copy, the thread that writes, or safetensors, which panics."""
    model, optimizer = build()

    def fail_as(error):
        def fail(*_args, **_kwargs):
            raise error

        return fail

    for error in (RuntimeError(ON_CPU), RuntimeError("PyObject pointer is null")):
        with monkeypatch.context() as patch:
            patch.setattr(saver.TensorWriter, "write_data", fail_as(error))
            found = raised(lambda: save_checkpoint(model, optimizer, tmp_path).wait())
        text = message_of(found, model, optimizer)
        assert text.startswith("error: out of memory: in saving\n")
        assert "--async_save false" in text


def test_the_rank_is_the_one_that_failed(monkeypatch):
    """A failed save is raised on all ranks."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert message_of(RuntimeError(ON_CPU)).startswith("error: out of memory: rank 0: in training\n")
    found = RuntimeError(f"checkpoint of step 4, rank 1: {ON_CPU}")
    assert message_of(found).startswith("error: out of memory: rank 1: in training\n")


# --- what it is full of


@pytest.mark.parametrize(
    ("method", "compute_dtype", "optim"),
    [("full", "float32", "adamw_torch"), ("qlora", "bfloat16", "adamw_torch"), ("lora", "bfloat16", "adamw_8bit")],
)
def test_components_are_what_the_model_really_holds(build, method, compute_dtype, optim):
    model, optimizer = build(method, optim, compute_dtype, lora_r=64)
    weights = list(model.named_parameters())
    num_trainable = sum(p.numel() for _, p in weights if p.requires_grad)
    frozen = sum(p.numel() * p.element_size() for _, p in weights if not p.requires_grad)
    if method == "qlora":
        for _, p in weights:
            if state := getattr(p, "quant_state", None):
                num = state.shape.numel()  # half a byte each, one per 64 of them, 4 per 256 of those, and two tables
                assert p.numel() * p.element_size() == num // 2
                frozen += num // 64 + -(-num // 64 // 256) * 4 + 16 * 4 + 256 * 4 + 4
    assert list(components(model, optimizer, True).values()) == [frozen, 4 * num_trainable, 0, 0, 0]
    backward(model)
    assert components(model, optimizer, True)[GRADIENTS] == 4 * num_trainable
    optimizer.step()
    optimizer.zero_grad()
    after = components(model, optimizer, True)
    if optim == "adamw_8bit":  # a byte each, a scale per 256, and two tables
        large = [p.numel() for _, p in weights if p.requires_grad and p.numel() >= 4096]
        small = [p.numel() for _, p in weights if p.requires_grad and p.numel() < 4096]
        moments = 2 * sum(n + -(-n // 256) * 4 for n in large) + 8 * sum(small) + 2 * 256 * 4
    else:  # and a counter of steps each
        moments = 8 * num_trainable + 4 * sum(p.requires_grad for _, p in weights)
    assert list(after.values()) == [frozen, 4 * num_trainable, 0, moments, 0]
    assert not any(components(model, optimizer, False).values())  # nothing of it is on a GPU


def test_what_was_taken_stands_beside_what_was_planned():
    """The parts add up to the peak, in both columns."""
    held = dict.fromkeys(COMPONENTS, 0) | {FROZEN: 3 * GIB, TRAINABLE: GIB}
    planned = Memory(components={TRAINABLE: GIB, FROZEN: GIB, FOUR_BIT: GIB, OPTIMISER: GIB, LOGITS: GIB}, moment="")
    assert [re.split(" {2,}", line) for line in shortage._table(held, 10 * GIB, planned)] == [
        ["", "taken", "planned"],
        ["frozen weights", "3.00 GiB", "2.00 GiB"],
        ["trainable weights", "1.00 GiB", "1.00 GiB"],
        ["optimiser", "0 bytes", "1.00 GiB"],
        ["activations, logits, the rest", "6.00 GiB", "1.00 GiB"],
        ["peak of this process", "10.00 GiB", "5.00 GiB"],
    ]
    assert len(shortage._table(held, 10 * GIB, None)) == 5


@pytest.mark.slow
def test_a_report_allocates_almost_nothing(build):
    model, optimizer = build("qlora", compute_dtype="bfloat16")
    backward(model)
    optimizer.step()
    error = RuntimeError(ON_CPU)
    message_of(error, model, optimizer)  # regular expressions are compiled once

    class NoTensors(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            raise AssertionError(f"{function} makes a tensor")

    tracemalloc.start()
    with NoTensors():
        message_of(error, model, optimizer)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


PROBE = """
import json, runpy, sys
from pathlib import Path
import torch
from transformers.models.llama.modeling_llama import LlamaMLP
from kit.memory import shortage as memory
from kit.train import step
from kit.strategy import accelerator as strategy

out = Path({out!r})
prepare, train_step = strategy.prepare, step.train_step
def prepared(accelerator, asked, model, optimizer):
    global topology
    topology = asked
    whole = [sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad is trains)
             for trains in (False, True)]
    result = prepare(accelerator, topology, model, optimizer)
    # At rest, each rank sees its own shards and nothing else.
    own = [p.to_local() if hasattr(p, "to_local") else p for p in result.model.parameters()]
    own = [sum(p.numel() * p.element_size() for p in own if p.requires_grad is trains) for trains in (False, True)]
    (out / f"rest-{{accelerator.process_index}}.json").write_text(json.dumps([whole, own]))
    return result
num_steps = num_layers = 0
def stepping(prepared, *args, **kwargs):
    global num_steps
    num_steps += 1
    accelerator, model, optimizer = prepared.accelerator, prepared.model, prepared.optimizer
    try:
        return train_step(prepared, *args, **kwargs)
    except RuntimeError as error:
        held = memory.components(model, optimizer, True)
        text = str(memory.explain(error, model, optimizer, recipe, topology))
        record = [*held.values(), text]
        (out / f"held-{{accelerator.process_index}}.json").write_text(json.dumps(record))
        accelerator.wait_for_everyone()
        raise
plain = LlamaMLP.forward
def forward(self, hidden):
    global num_layers
    num_layers += num_steps == 2
    if num_layers == 2:
        raise RuntimeError({message!r})
    return plain(self, hidden)
strategy.prepare, step.train_step, LlamaMLP.forward = prepared, stepping, forward
from kit.config.command_line import read_command_line
recipe = read_command_line(sys.argv[1:]).recipe
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("config", "method"), [("fsdp", "qlora"), ("fsdp1", "lora")])
def test_sharded_tensors_count_by_the_part_this_rank_holds(finetune, fp32, tmp_path, config, method):
    """Also where the pass ended in the middle of a layer, which is then gathered whole."""
    words = {"out": str(tmp_path), "message": ON_CPU, "script": str(ROOT / "recipes/finetune.py")}
    (tmp_path / "probe.py").write_text(PROBE.format(**words))
    flags = {**finetune.defaults, "config": fp32[config], "method": method, "output_dir": tmp_path / "run"}
    log = tmp_path / "log.txt"
    run_ranks(str(tmp_path / "probe"), [f"--{name}={value}" for name, value in flags.items()], 2, log)
    assert (tmp_path / "held-0.json").exists() and (tmp_path / "held-1.json").exists(), log.read_text()
    totals = [0, 0]
    for rank in range(2):
        whole, own = json.loads((tmp_path / f"rest-{rank}.json").read_text())
        frozen, trainable, gradients, moments, gathered, text = json.loads((tmp_path / f"held-{rank}.json").read_text())
        assert trainable == own[1] and gradients == 0
        assert config == "fsdp1" or 0 < gathered < sum(whole)
        assert 0 <= moments - 2 * trainable <= 4 * 100  # and a counter for each tensor
        assert frozen == own[0] if method != "qlora" else frozen > own[0]  # every rank has all scales
        assert text.startswith(f"error: out of memory: rank {rank}: in the forward pass (LlamaMLP)")
        totals = [totals[0] + own[0], totals[1] + own[1]]
    assert totals == whole and max(own) < max(whole)


# --- what helps


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_continues_with_the_first_group_only_and_every_change_is_allowed(method):
    """As the output folder, the recipe and the launch decide it."""
    recipe = make(method=method, eval_split_size=2, predict_with_generate=True)
    text = str(explain(torch.OutOfMemoryError(ON_GPU), None, None, recipe, placed(device_type="cuda")))
    keys = re.findall(r"^ +--(\w+)", text, re.M)
    assert keys[0] == "per_device_eval_batch_size" and keys[-1] == "max_length" and "config" in keys
    for is_other, part in enumerate(text.split("-> these make it another run")):
        for key, value in re.findall(r"^ +--(\w+) (\S+)", part, re.M):
            if key != "config":
                more = {"gradient_checkpointing": True} if key == "activation_offload" else {}
                changed = Recipe(**recipe.model_dump() | more | {key: value})
                assert changed != recipe and not find_conflicts(changed, {}, set()), key
                assert not launch._batch_problems(changed, 1), key
                assert (identity(changed, "x", "base") != identity(recipe, "x", "base")) == is_other, key


def test_a_command_that_trains_nothing_gets_no_setting_of_training():
    """It has no step, no checkpoint and no run that could go on."""
    error = torch.OutOfMemoryError(ON_GPU)
    text = str(explain(error, None, None, make(method="full"), placed(device_type="cuda"), trains=False))
    assert re.findall(r"^ +--(\w+)", text, re.M) == ["per_device_eval_batch_size", "config", "max_length"]
    assert "checkpoint" not in text


def test_a_gpu_that_is_full_is_compared_with_the_plan():
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 320}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=1))
    text = message_of(torch.OutOfMemoryError(ON_GPU), model, topology=placed(device_type="cuda"), method="full")
    assert "total capacity of 79.25 GiB of which 1.50 GiB is free" in text
    assert re.search(r"^ +taken +planned$", text, re.M) and re.search(
        r"^ +optimiser +0 bytes +\d+\.\d KiB$", text, re.M
    )
    assert "planned" not in message_of(RuntimeError(ON_CPU), model, method="full")
