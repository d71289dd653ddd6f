"""Out of memory: recognised wherever it comes from, measured by component, with the phase and what helps."""

import errno
import re
from unittest.mock import Mock

import pytest
import torch
from checkpoint_helpers import saver_of
from memory_helpers import GIB, ON_CPU, ON_GPU, fail, make, message_of, placed, raised
from transformers import AutoModelForCausalLM

from kit.checkpoint import save as saver
from kit.config.conflicts import find_conflicts
from kit.config.recipe import Recipe
from kit.memory import out_of_memory
from kit.memory.formulas import FOUR_BIT, FROZEN, GRADIENTS, LOGITS, OPTIMISER, TRAINABLE, Memory
from kit.memory.out_of_memory import COMPONENTS, components, explain
from kit.model.build import build_model, open_config
from kit.model.load_plan import LoadPlan
from kit.run.identity import identity
from kit.strategy.launch import launch
from kit.system.errors import TrainingError, UserError
from kit.system.phases import LOADING, SAVING, TRAINING


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
        RuntimeError("Error out of memory at line 88 in file /src/csrc/ops.cu"),
    ):
        assert message_of(error).startswith("error: out of memory: in training\n"), error
        outer = TrainingError("rank 1")
        outer.__cause__ = error
        assert (str(error).splitlines() or ["MemoryError"])[0] in message_of(outer)


def test_other_errors_are_not_explained():
    for error in (
        RuntimeError("CUDA error: device-side assert triggered"),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyError("out of memory"),
        KeyboardInterrupt(),
    ):
        assert explain(error, None, None, TRAINING, make(), placed()) is None, error


def test_weights_that_do_not_fit_are_no_mistake_in_the_models_name(model_folder, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    recipe = make(model_name_or_path=str(model_folder), method="lora")
    error = raised(build_model, recipe, open_config(recipe), LoadPlan(compute_dtype="float32", device="cpu"))
    assert not isinstance(error, UserError)
    text = message_of(error, phase=LOADING)
    assert text.startswith("error: out of memory: in loading\n")
    assert "--method qlora" in text


# --- where it happened


def test_the_pass_is_named(build):
    model, _ = build()
    model.model.layers[1].mlp.gate_proj.register_forward_pre_hook(fail)
    assert "in the forward pass\n" in message_of(raised(backward, model))
    model, _ = build()
    model.model.layers[1].mlp.register_full_backward_hook(fail)
    assert "in the backward pass\n" in message_of(raised(backward, model))


def test_a_save_that_fails_is_named_whoever_met_the_limit(build, tmp_path, monkeypatch):
    """The copy, or safetensors, which panics, in the thread that writes."""
    model, optimizer = build()
    for message in (ON_CPU, "PyObject pointer is null"):
        monkeypatch.setattr(saver.TensorWriter, "write_data", Mock(side_effect=RuntimeError(message)))
        saving = saver_of(tmp_path)
        saving.save(model, optimizer, {"step": 1})
        text = message_of(raised(saving.wait), model, optimizer, phase=SAVING)
        assert text.startswith("error: out of memory: in saving\n") and "--async_save false" in text


def test_the_rank_is_the_one_that_failed(monkeypatch):
    """A failed save is raised on all ranks."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert message_of(RuntimeError(ON_CPU)).startswith("error: out of memory: rank 0: in training\n")
    found = RuntimeError(f"checkpoint of step 4, rank 1: {ON_CPU}")
    assert message_of(found).startswith("error: out of memory: rank 1: in training\n")


# --- what it is full of


@pytest.mark.parametrize(("method", "optim"), [("full", "adamw_torch"), ("lora", "adamw_8bit")])
def test_components_are_what_the_model_really_holds(build, method, optim):
    model, optimizer = build(method, optim, "float32" if method == "full" else "bfloat16", lora_r=64)
    weights = list(model.named_parameters())
    num_trainable = sum(p.numel() for _, p in weights if p.requires_grad)
    frozen = sum(p.numel() * p.element_size() for _, p in weights if not p.requires_grad)
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


def test_measured_memory_is_compared_with_the_plan():
    """The parts add up to the peak, in both columns."""
    held = dict.fromkeys(COMPONENTS, 0) | {FROZEN: 3 * GIB, TRAINABLE: GIB}
    planned = Memory(components={TRAINABLE: GIB, FROZEN: GIB, FOUR_BIT: GIB, OPTIMISER: GIB, LOGITS: GIB}, moment="")
    assert [re.split(" {2,}", line) for line in out_of_memory._table(held, 10 * GIB, planned)] == [
        ["", "taken", "planned"],
        ["frozen weights", "3.00 GiB", "2.00 GiB"],
        ["trainable weights", "1.00 GiB", "1.00 GiB"],
        ["optimiser", "0 bytes", "1.00 GiB"],
        ["activations, logits, the rest", "6.00 GiB", "1.00 GiB"],
        ["peak of this process", "10.00 GiB", "5.00 GiB"],
    ]
    assert len(out_of_memory._table(held, 10 * GIB, None)) == 5


# --- what helps


@pytest.mark.parametrize(
    "settings", [{"method": "full"}, {"method": "lora"}, {"method": "full", "objective": "distil", "teacher": "x"}]
)
def test_a_run_continues_with_what_has_no_mark_and_every_change_is_allowed(settings):
    """As the output folder, the recipe and the launch decide it."""
    recipe = make(eval_split_size=2, predict_with_generate=True, **settings)
    text = str(explain(torch.OutOfMemoryError(ON_GPU), None, None, TRAINING, recipe, placed(device_type="cuda")))
    lines = re.findall(r"^ +(\*?) ?--(\w+) (\S+)", text, re.M)
    assert lines[0][1] == "per_device_eval_batch_size" and lines[-1][1] == "max_length"
    assert ("teacher_in_4bit" in text, "teacher_top_k" in text) == (("teacher" in settings),) * 2
    for mark, key, value in lines:
        if key != "config":
            more = {"gradient_checkpointing": True} if key == "activation_offload" else {}
            changed = Recipe(**recipe.model_dump() | more | {key: value})
            assert changed != recipe and not list(find_conflicts(changed, {}, set())), key
            assert not launch._batch_problems(changed, 1), key
            assert (identity(changed, "x", "base") != identity(recipe, "x", "base")) == bool(mark), key


def test_a_command_that_trains_nothing_gets_no_setting_of_training():
    """It has no step, no checkpoint and no run that could go on."""
    error = torch.OutOfMemoryError(ON_GPU)
    text = str(explain(error, None, None, TRAINING, make(method="full"), placed(device_type="cuda"), trains=False))
    assert re.findall(r"^ +--(\w+)", text, re.M) == ["per_device_eval_batch_size", "config", "max_length"]
    assert "checkpoint" not in text
