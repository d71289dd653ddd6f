"""Out of memory: recognised wherever it comes from, counted as it is, and answered with settings that work."""

import errno
import json
import re
import sys
import tracemalloc
from itertools import product

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from conftest import ROOT, run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from kit import evaluate, memory, run
from kit.config import LoadPlan, Recipe
from kit.contradictions import contradictions
from kit.errors import TrainingError, UserError
from kit.memory import PHASES, Device, Held, components, explain, settings
from kit.model import build_model, open_config
from kit.optim import build_optimizer

GIB = 2**30
ON_CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4194304 bytes. Error code 12 (Cannot allocate memory)"
)
ON_GPU = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.50 GiB is "
    "free. Process 12 has 30.00 GiB memory in use. Including non-PyTorch memory, this process has 47.75 GiB memory in "
    "use. Of the allocated memory 40.00 GiB is allocated by PyTorch, and 6.25 GiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
)
CPU = Device("CPU", 80 * GIB, GIB, 78 * GIB)
GPU = Device("GPU 0", 80 * GIB, GIB, 78 * GIB)
LORA = Held(frozen=15 * GIB, trainable=GIB // 10, optimizer=GIB // 5, gradients_to_come=GIB // 10)
FULL = Held(trainable=20 * GIB, optimizer=20 * GIB, gradients_to_come=20 * GIB, optimizer_to_come=20 * GIB)


def make(**changes):
    plain = {"model_name_or_path": "some/model", "dataset": "some/data", "global_batch_size": 24}
    return Recipe(**plain | {"per_device_train_batch_size": 4, "max_length": 2048} | changes)


def told(error, model=None, optimizer=None, num_processes=1, **changes):
    answer = explain(error, model, optimizer, make(**changes), num_processes)
    assert answer is not None and len(answer.problems) == 1
    return str(answer)


def raised(function, *args, **kwargs):
    """The error, with its traceback."""
    with pytest.raises(BaseException) as info:
        function(*args, **kwargs)
    return info.value


def fail(*_args, **_kwargs):
    raise RuntimeError(ON_CPU)


@pytest.fixture(scope="module")
def build(model_folder):
    Accelerator(cpu=True)  # its optimiser asks for one

    def build(method="full", optim="adamw_torch", compute_dtype="float32", **changes):
        recipe = make(model_name_or_path=str(model_folder), method=method, optim=optim, **changes)
        model = build_model(recipe, open_config(recipe), LoadPlan(compute_dtype=compute_dtype, device="cpu"))
        return model, AcceleratedOptimizer(build_optimizer(model, recipe))

    return build


def backward(model):
    model(input_ids=torch.arange(3, 35)[None]).logits.float().logsumexp(-1).sum().backward()


# --- what is recognised


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (RuntimeError(ON_CPU), "4.0 MiB asked for in training"),
        (torch.OutOfMemoryError(ON_GPU), "2.00 GiB asked for in training"),
        (MemoryError(), "in training"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "in training"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), "in training"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "in training"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "in training"),
        (RuntimeError("std::bad_alloc"), "in training"),
        (RuntimeError("Error out of memory at line 88 in file /src/csrc/ops.cu"), "in training"),
        (RuntimeError("unable to mmap 1073741824 bytes from file <m>: Cannot allocate memory (12)"), "1.00 GiB asked"),
    ],
)
def test_every_way_to_say_it_is_recognised(error, asked):
    assert told(error).startswith(f"error: out of memory: {asked}")


def test_the_allocators_of_torch_python_and_numpy_are_understood():
    assert "4.00 PiB asked for" in told(raised(torch.empty, 1 << 50, dtype=torch.int32))
    assert "512.00 TiB asked for" in told(raised(np.empty, 1 << 49, dtype=np.uint8))
    assert told(raised(bytearray, 1 << 50)).startswith("error: out of memory: in training")


@pytest.mark.parametrize("chained", ["cause", "context", "suppressed", "twice"])
def test_it_is_found_behind_what_was_raised_from_it(chained):
    def wrapped():
        try:
            fail()
        except RuntimeError as error:
            if chained == "context":
                raise ValueError("recomputation failed")  # noqa: B904
            if chained == "twice":
                try:
                    raise TrainingError("rank 1") from error
                except TrainingError as second:
                    raise UserError() from second
            raise ValueError("recomputation failed") from (error if chained == "cause" else None)

    assert "4.0 MiB asked for" in told(raised(wrapped))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        OSError(errno.ENOSPC, "No space left on device"),
        TrainingError("loss nan, gradient norm nan"),
        UserError(),
        KeyError("out of memory"),
        KeyboardInterrupt(),
    ],
)
def test_every_other_error_stays_what_it_is(error):
    assert explain(error, None, None, make(), 1) is None


def test_weights_that_do_not_fit_are_no_mistake_in_the_models_name(model_folder, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    recipe = make(model_name_or_path=str(model_folder), method="lora")
    error = raised(build_model, recipe, open_config(recipe), LoadPlan(compute_dtype="float32", device="cpu"))
    assert not isinstance(error, UserError)
    text = told(error)
    assert "4.0 MiB asked for in loading\n" in text
    assert "--method qlora" in text and "--per_device" not in text and "--max_length" not in text


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
    assert "asked for in the forward pass (LlamaMLP)\n" in told(raised(backward, broken(model, "LlamaMLP")))

    model, _ = build()
    model.model.layers[1].mlp.register_full_backward_hook(fail)
    assert "asked for in the backward pass\n" in told(raised(backward, model))


def test_a_layer_computed_again_is_part_of_the_backward_pass(build):
    model, _ = build(gradient_checkpointing=True)
    num_calls = 0

    def fail_again(*_args):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            fail()

    model.model.layers[2].mlp.up_proj.register_forward_pre_hook(fail_again)
    assert "asked for in the backward pass (LlamaMLP)\n" in told(raised(backward, model), gradient_checkpointing=True)


def test_the_optimisers_step_blames_no_activations(build, monkeypatch):
    model, optimizer = build()
    backward(model)
    monkeypatch.setattr(torch.optim.AdamW, "_init_group", fail)
    text = told(raised(optimizer.step), method="full")
    assert "asked for in the optimiser's step\n" in text
    assert "--per_device_train_batch_size" not in text and "--max_length" not in text


def test_evaluation_and_generation_are_told_apart(build, monkeypatch):
    model, _ = build()
    ids = torch.arange(3, 9)[None]
    broken(model, "LlamaMLP")
    monkeypatch.setattr(evaluate, "_loss", lambda accelerator, model, *_: model(input_ids=ids))
    text = told(raised(evaluate.evaluate, None, model, make(), None, None, None))
    assert "asked for in evaluation (LlamaMLP)\n" in text
    assert "--gradient_checkpointing" not in text and "--max_new_tokens" not in text
    monkeypatch.setattr(evaluate, "_loss", lambda *_: {})
    monkeypatch.setattr(evaluate, "_answers", lambda accelerator, model, *_: model.generate(ids, max_new_tokens=2))
    recipe = make(predict_with_generate=True, eval_split_size=2)
    text = told(raised(evaluate.evaluate, None, model, recipe, None, None, None))
    assert "asked for in generation (LlamaMLP)\n" in text
    assert "--max_new_tokens 64" in text and "--predict_with_generate false" in text


def test_the_functions_that_tell_the_phase_exist():
    import accelerate.optimizer
    import transformers.generation.utils

    from kit import checkpoint, export, model, saver, strategy

    holders = {
        "accelerate.optimizer": accelerate.optimizer.AcceleratedOptimizer,
        "transformers.generation.utils": transformers.generation.utils.GenerationMixin,
        "torch.autograd": torch.autograd,
        "kit.saver": saver.Saver,
    }
    holders |= {module.__name__: module for module in (checkpoint, evaluate, export, model, strategy)}
    for name in PHASES:
        module, _, function = name.rpartition(".")
        assert callable(getattr(holders[module], function)), name


# --- what it is full of


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adamw_8bit"])
@pytest.mark.parametrize(
    ("method", "compute_dtype"), [("full", "float32"), ("lora", "bfloat16"), ("qlora", "bfloat16")]
)
def test_components_are_what_the_model_really_holds(build, method, compute_dtype, optim):
    model, optimizer = build(method, optim, compute_dtype, lora_r=64)
    in_8_bits = optim == "adamw_8bit"
    before = components(model, optimizer, True, in_8_bits)
    weights = list(model.named_parameters())
    num_trainable = sum(p.numel() for _, p in weights if p.requires_grad)
    assert (before.trainable, before.gradients, before.optimizer) == (4 * num_trainable, 0, 0)
    frozen = sum(p.numel() * p.element_size() for _, p in weights if not p.requires_grad)
    if method == "qlora":
        for _, p in weights:
            if state := getattr(p, "quant_state", None):
                num = state.shape.numel()  # half a byte each, one per 64 of them, 4 per 256 of those, and two tables
                assert p.numel() * p.element_size() == num // 2
                frozen += num // 64 + -(-num // 64 // 256) * 4 + 16 * 4 + 256 * 4 + 4
    elif method == "lora":
        assert frozen == 2 * sum(p.numel() for _, p in weights if not p.requires_grad)
    assert before.frozen == frozen

    backward(model)
    after = components(model, optimizer, True, in_8_bits)
    assert (after.gradients, after.gradients_to_come) == (before.gradients_to_come, 0) == (4 * num_trainable, 0)
    optimizer.step()
    optimizer.zero_grad()
    after = components(model, optimizer, True, in_8_bits)
    assert (after.frozen, after.trainable, after.gradients) == (frozen, 4 * num_trainable, 0)
    assert after.gradients_to_come == 4 * num_trainable and after.optimizer_to_come == 0
    if in_8_bits:  # a byte each, a scale per 256, and two tables
        large = [p.numel() for _, p in weights if p.requires_grad and p.numel() >= 4096]
        small = [p.numel() for _, p in weights if p.requires_grad and p.numel() < 4096]
        assert large and after.optimizer == 2 * sum(n + -(-n // 256) * 4 for n in large) + 8 * sum(small) + 2 * 256 * 4
        assert before.optimizer_to_come == 2 * sum(large) + 8 * sum(small)
    else:  # and a counter of steps each
        num_tensors = sum(p.requires_grad for _, p in weights)
        assert after.optimizer == 8 * num_trainable + 4 * num_tensors
        assert before.optimizer_to_come == 8 * num_trainable
    assert components(model, optimizer, False, in_8_bits) == Held()  # nothing of it is on a GPU


def test_the_table_adds_up_to_the_peak(build):
    model, optimizer = build("lora")
    backward(model)
    optimizer.step()
    rows = re.findall(r"^ +(.+?)  +([\d.]+ \w+)", told(RuntimeError(ON_CPU), model, optimizer, method="lora"), re.M)
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    sizes = {name: float(text.split()[0]) * units[text.split()[1]] for name, text in rows if text.split()[1] in units}
    parts = ["frozen weights", "trainable weights", "gradients", "optimiser state", "the rest"]
    assert sum(sizes[part] for part in parts) == pytest.approx(sizes["peak of this process"], rel=0.01)
    held = components(model, optimizer, True, False)
    assert sizes["frozen weights"] == pytest.approx(held.frozen, rel=0.01)
    assert sizes["gradients"] == pytest.approx(held.trainable, rel=0.01)


def test_telling_asks_nothing_of_a_full_memory(build):
    model, optimizer = build("qlora", compute_dtype="bfloat16")
    backward(model)
    optimizer.step()
    error = RuntimeError(ON_CPU)
    told(error, model, optimizer)  # regular expressions are compiled once

    class NoTensors(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            raise AssertionError(f"{function} makes a tensor")

    tracemalloc.start()
    with NoTensors():
        told(error, model, optimizer)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


LIMITED = """
import resource
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from kit.config import Recipe
from kit.memory import explain

shape = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=320)
model = LlamaForCausalLM(LlamaConfig(**shape))
optimizer = torch.optim.AdamW(model.parameters())
recipe = Recipe(model_name_or_path="some/model", dataset="some/data", method="full", per_device_train_batch_size=2)
in_use = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
limit = in_use + (96 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    for power in range(20):
        model(input_ids=torch.ones(2**power, 64, dtype=torch.long)).logits.square().sum().backward()
except Exception as error:
    print(f"limit {limit / 2**30:.1f}")
    print(explain(error, model, optimizer, recipe, 1))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts so on Linux only")
def test_a_process_that_meets_its_limit_can_still_tell(tmp_path):
    (tmp_path / "limited.py").write_text(LIMITED)
    run_ranks(str(tmp_path / "limited"), [], 1, log := tmp_path / "log.txt")
    text = log.read_text()
    found = re.search(r"^limit ([\d.]+)\n[^;]+; this process may reserve ([\d.]+) (MiB|GiB) \(ulimit -d\)$", text, re.M)
    assert found and float(found[2]) / (1 if found[3] == "GiB" else 1024) == pytest.approx(float(found[1]), abs=0.06), (
        text
    )
    assert re.search(r"out of memory: [\d.]+ MiB asked for in the (forward|backward) pass", text), text
    assert "ulimit -d unlimited" in text and "--per_device_train_batch_size 1 " in text
    assert "--config" not in text and "nvidia-smi" not in text and "--optim" not in text  # the state is small


PROBE = """
import json, runpy, sys
from pathlib import Path
import torch
from transformers.models.llama.modeling_llama import LlamaMLP
from kit import memory, step, strategy

out, rank = Path({out!r}), None
prepare, train_step = strategy.prepare, step.train_step
def prepared(accelerator, topology, model, optimizer):
    whole = [sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad is trains)
             for trains in (False, True)]
    model, optimizer, actual = prepare(accelerator, topology, model, optimizer)
    # At rest, each rank sees its own shards and nothing else.
    own = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    own = [sum(p.numel() * p.element_size() for p in own if p.requires_grad is trains) for trains in (False, True)]
    (out / f"rest-{{accelerator.process_index}}.json").write_text(json.dumps([whole, own]))
    return model, optimizer, actual
num_steps = num_layers = 0
def stepping(*args, **kwargs):
    global num_steps
    num_steps += 1
    accelerator, model, optimizer = args[:3]
    try:
        return train_step(*args, **kwargs)
    except RuntimeError as error:
        held = memory.components(model, optimizer, True, False)
        text = str(memory.explain(error, model, optimizer, recipe, accelerator.num_processes))
        record = [held.frozen, held.trainable, held.gradients, held.optimizer, held.sharded, text]
        (out / f"held-{{accelerator.process_index}}.json").write_text(json.dumps(record))
        accelerator.wait_for_everyone()
        raise
plain = LlamaMLP.forward
def forward(self, hidden):
    global num_layers
    num_layers += num_steps == 2
    if num_layers == 2 and {place!r} == "LlamaMLP":
        raise RuntimeError({message!r})
    return plain(self, hidden)
entropy = torch.nn.functional.cross_entropy
def cross_entropy(*args, **kwargs):
    if num_steps == 2 and {place!r} == "logits":
        raise RuntimeError({message!r})
    return entropy(*args, **kwargs)
torch.nn.functional.cross_entropy = cross_entropy
strategy.prepare, step.train_step, LlamaMLP.forward = prepared, stepping, forward
from kit.command_line import read_command_line
recipe = read_command_line(sys.argv[1:]).recipe
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize(("config", "place"), [("fsdp", "LlamaMLP"), ("fsdp", "logits"), ("fsdp1", "LlamaMLP")])
def test_sharded_tensors_count_by_the_part_this_rank_holds(finetune, fp32, tmp_path, config, place, method):
    """Also where the pass ended in the middle of a layer, or in the head, which is then gathered whole."""
    words = {"out": str(tmp_path), "place": place, "message": ON_CPU, "script": str(ROOT / "recipes/finetune.py")}
    (tmp_path / "probe.py").write_text(PROBE.format(**words))
    flags = {**finetune.defaults, "config": fp32[config], "method": method, "output_dir": tmp_path / "run"}
    log = tmp_path / "log.txt"
    run_ranks(str(tmp_path / "probe"), [f"--{name}={value}" for name, value in flags.items()], 2, log)
    assert (tmp_path / "held-0.json").exists() and (tmp_path / "held-1.json").exists(), log.read_text()
    totals = [0, 0]
    for rank in range(2):
        whole, own = json.loads((tmp_path / f"rest-{rank}.json").read_text())
        frozen, trainable, gradients, moments, sharded, text = json.loads((tmp_path / f"held-{rank}.json").read_text())
        assert sharded and trainable == own[1] and gradients == 0
        assert 0 <= moments - 2 * trainable <= 4 * 100  # and a counter for each tensor
        assert frozen == own[0] if method != "qlora" else frozen > own[0]  # every rank has all scales
        assert text.startswith(f"error: out of memory: rank {rank}: 4.0 MiB asked for in the forward pass ({place})")
        totals = [totals[0] + own[0], totals[1] + own[1]]
    assert totals == whole and max(own) < max(whole)


# --- what to change


def flags(ways):
    return [way.text for way in ways]


@pytest.mark.parametrize(
    ("changes", "phase", "held", "device", "num_processes", "expected"),
    [
        # On a GPU: the batch, then recomputation, then more GPUs; then what makes another run.
        ({}, "", LORA, GPU, 1, "batch_size_2 checkpointing fsdp | qlora max_length_1024"),
        ({"gradient_checkpointing": True}, "", LORA, GPU, 1, "batch_size_2 fsdp | qlora max_length_1024"),
        ({"per_device_train_batch_size": 1}, "", LORA, GPU, 1, "checkpointing fsdp | qlora max_length_1024"),
        ({"use_dora": True}, "", LORA, GPU, 1, "batch_size_2 checkpointing fsdp | max_length_1024"),
        ({"method": "qlora"}, "", LORA, GPU, 1, "batch_size_2 checkpointing fsdp | max_length_1024"),
        ({"attn_implementation": "eager"}, "", LORA, GPU, 1,
         "attn batch_size_2 checkpointing fsdp | qlora max_length_1024"),
        ({"attn_implementation": "sdpa", "packing": True}, "", LORA, GPU, 1,
         "attn batch_size_2 checkpointing fsdp | qlora max_length_1024"),
        ({"attn_implementation": "sdpa"}, "", LORA, GPU, 1, "batch_size_2 checkpointing fsdp | qlora max_length_1024"),
        # The global batch stays divisible: 24 over 2 processes is 12 each, of which 5 is no divisor.
        ({"per_device_train_batch_size": 12}, "", LORA, GPU, 2,
         "batch_size_6 checkpointing fsdp | qlora max_length_1024"),
        ({"per_device_train_batch_size": 6}, "", LORA, GPU, 4,
         "batch_size_3 checkpointing fsdp | qlora max_length_1024"),
        ({"global_batch_size": 10, "per_device_train_batch_size": 5}, "", LORA, GPU, 2,
         "batch_size_1 checkpointing fsdp | qlora max_length_1024"),
        # All weights: where the optimiser's state weighs, it can be smaller, or gone.
        ({"method": "full"}, "", FULL, GPU, 1, "batch_size_2 checkpointing fsdp | 8bit lora max_length_1024"),
        ({"method": "full", "optim": "adamw_8bit"}, "", FULL, GPU, 1,
         "batch_size_2 checkpointing fsdp | paged lora max_length_1024"),
        ({"method": "full", "optim": "paged_adamw_8bit"}, "", FULL, GPU, 1,
         "batch_size_2 checkpointing fsdp | lora max_length_1024"),
        # Sharded already: no bitsandbytes optimiser, more GPUs, or the CPU's memory.
        ({"method": "full"}, "", Held(trainable=20 * GIB, optimizer=40 * GIB, sharded=True), GPU, 2,
         "batch_size_2 checkpointing num_processes_4 offload | lora max_length_1024"),
        # What is waiting in CPU memory already is not in the way on the GPU.
        ({"method": "full"}, "", Held(sharded=True), GPU, 2, "batch_size_2 checkpointing | max_length_1024"),
        # Nothing but weights and state: activations are not to blame.
        ({"method": "full"}, "the optimiser's step", FULL, GPU, 1, "fsdp | 8bit lora"),
        ({}, "loading", Held(), GPU, 1, "fsdp | qlora"),
        ({"method": "full"}, "loading", Held(), GPU, 1, "fsdp | lora"),
        ({}, "evaluation", LORA, GPU, 1, "batch_size_2 fsdp | qlora max_length_1024"),
        ({}, "generation", LORA, GPU, 1, "batch_size_2 new_tokens_64 generate fsdp | qlora max_length_1024"),
        # A CPU: more processes take more of the same memory.
        ({}, "", Held(), CPU, 1, "batch_size_2 checkpointing | max_length_1024"),
        ({}, "", Held(), CPU, 2, "batch_size_2 checkpointing num_processes_1 | max_length_1024"),
        ({"method": "full"}, "", FULL, CPU, 1, "batch_size_2 checkpointing | 8bit lora max_length_1024"),
        ({"method": "full", "optim": "adamw_8bit"}, "", FULL, CPU, 1,
         "batch_size_2 checkpointing | lora max_length_1024"),
    ],
)  # fmt: skip
def test_only_what_applies_is_suggested_the_cheapest_first(changes, phase, held, device, num_processes, expected):
    short = {
        "attn": "--attn_implementation auto",
        "checkpointing": "--gradient_checkpointing true",
        "fsdp": "--config fsdp",
        "offload": "--config fsdp_offload",
        "generate": "--predict_with_generate false",
        "8bit": "--optim adamw_8bit",
        "paged": "--optim paged_adamw_8bit",
        "lora": "--method lora",
        "qlora": "--method qlora",
        "batch_size": "--per_device_train_batch_size",
        "new_tokens": "--max_new_tokens",
        "max_length": "--max_length",
        "num_processes": "--num_processes",
    }
    words = [
        short[word] if word in short else f"{short[word.rpartition('_')[0]]} {word.rpartition('_')[2]}"
        for word in expected.replace("|", "").split()
    ]
    assert flags(settings(make(**changes), phase, 0, held, device, num_processes)) == words


def test_memory_that_others_hold_or_a_limit_denies_costs_nothing_to_get():
    shared = Device("GPU 0", 80 * GIB, GIB, 40 * GIB, others=30 * GIB)
    assert flags(settings(make(), "", 0, LORA, shared, 1))[0] == "nvidia-smi"
    limited = Device("CPU", 32 * GIB, 30 * GIB, GIB, limit=(GIB, "-v"))
    assert flags(settings(make(), "", 0, Held(), limited, 1))[0] == "ulimit -v unlimited"


@pytest.mark.parametrize(
    ("asked", "unused", "environment", "is_told"),
    [
        (2 * GIB, 6 * GIB, {}, True),
        (7 * GIB, 6 * GIB, {}, False),  # it would not have been enough
        (0, 9 * GIB, {}, True),
        (0, 7 * GIB, {}, False),
        (2 * GIB, 6 * GIB, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, False),
        (2 * GIB, 6 * GIB, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}, False),
    ],
)
def test_fragments_are_told_where_they_would_have_been_enough(monkeypatch, asked, unused, environment, is_told):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = flags(settings(make(), "", asked, LORA, Device("GPU 0", 80 * GIB, GIB, 70 * GIB, unused), 1))
    assert ("PYTORCH_ALLOC_CONF=expandable_segments:True" in found) == is_told


def test_a_gpu_is_described_in_the_words_of_its_own_message():
    lines = told(torch.OutOfMemoryError(ON_GPU), num_processes=2).splitlines()
    assert lines[1].split() == "GPU 0 79.25 GiB 1.50 GiB free".split()
    lost = "and 6.25 GiB lost between tensors"
    assert lines[2].split() == f"peak of this process 40.00 GiB allocated, {lost}".split()
    assert any("nvidia-smi" in line and "30.00 GiB of this GPU" in line for line in lines)


def test_a_gpu_that_says_little_is_asked(monkeypatch):
    answers = {
        "is_available": True,
        "current_device_index": 3,
        "max_memory_allocated": 70 * GIB,
        "memory_allocated": 60 * GIB,
        "memory_reserved": 72 * GIB,
        "get_memory_info": (GIB, 80 * GIB),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.accelerator, name, lambda answer=answer: answer)
    text = told(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert re.search(r"GPU 3 +80.00 GiB +1.00 GiB free", text)
    assert re.search(r"peak of this process +70.00 GiB", text) and "and 12.00 GiB lost" in text
    assert "expandable_segments" in text and "nvidia-smi" not in text
    # A CPU that is full is not described by its GPU.
    assert "GPU" not in told(RuntimeError(ON_CPU)) and "GPU" not in told(MemoryError())


def test_a_model_without_another_attention_keeps_eager(build):
    model, _ = build()
    assert "--attn_implementation auto" in told(RuntimeError(ON_CPU), model, attn_implementation="eager")
    model._supports_sdpa = False
    assert "--attn_implementation" not in told(RuntimeError(ON_CPU), model, attn_implementation="eager")


def changed_by(flag, recipe):
    """The recipe with a flag of the message, as the schema takes it; None for a flag of the launch."""
    name, value = flag.removeprefix("--").split()
    return Recipe(**recipe.model_dump() | {name: value}) if name in Recipe.model_fields else None


@pytest.mark.parametrize("error", [RuntimeError(ON_CPU), torch.OutOfMemoryError(ON_GPU)], ids=["cpu", "gpu"])
def test_what_is_said_to_go_on_with_the_run_does_and_the_rest_does_not(error, monkeypatch):
    """As ``run.check_output_dir`` decides it."""
    monkeypatch.setattr(memory, "components", lambda *_: Held(1, 1, 1, 1, 1, 1))
    monkeypatch.setattr(memory, "_SMALL", 0.0)
    seen = set()
    for phase in ("forward", "generation"):
        monkeypatch.setattr(memory, "_place", lambda error, phase=phase: (phase, ""))
        recipe = make(method="full", attn_implementation="eager", eval_split_size=2, predict_with_generate=True)
        text = str(explain(error, None, None, recipe, 1))
        same, other = text.split("-> these make it another run")
        for is_other, part in enumerate((same, other)):
            for flag in re.findall(r"^ +(--\w+ \S+)", part, re.M):
                if changed := changed_by(flag, recipe):
                    seen.add(flag.split()[0])
                    assert (run.identity(changed, "x", "base") != run.identity(recipe, "x", "base")) == is_other, flag
    assert {"--per_device_train_batch_size", "--gradient_checkpointing", "--optim", "--method", "--max_length"} <= seen
    assert {"--attn_implementation", "--max_new_tokens", "--predict_with_generate"} <= seen


def test_every_message_is_short_and_every_suggestion_is_allowed(monkeypatch):
    crowded = Device("GPU 0", 80 * GIB, GIB, 70 * GIB, unused=9 * GIB, others=9 * GIB)
    limited = Device("CPU", 32 * GIB, GIB, 31 * GIB, limit=(GIB, "-d"))
    held = [Held(GIB, GIB, GIB, GIB, GIB, GIB, sharded) for sharded in (False, True)]
    monkeypatch.setattr(memory, "_SMALL", 0.0)
    methods, optims = ("full", "lora", "qlora"), ("adamw_torch", "adamw_8bit", "paged_adamw_8bit")
    phases = ["the forward pass", *sorted(set(PHASES.values()))]
    for device, parts, phase, method, optim, packing, num in product(
        (crowded, limited), held, phases, methods, optims, (False, True), (1, 2)
    ):
        monkeypatch.setattr(memory, "_device", lambda error, device=device: device)
        monkeypatch.setattr(memory, "components", lambda *_, parts=parts: parts)
        monkeypatch.setattr(memory, "_place", lambda error, phase=phase: (phase, " (LlamaDecoderLayer)"))
        more = {"eval_split_size": 2, "predict_with_generate": True, "attn_implementation": "eager"}
        recipe = make(method=method, optim=optim, packing=packing, **more)
        text = str(explain(RuntimeError(ON_CPU), None, None, recipe, num))
        lines = text.splitlines()
        assert len(lines) <= 20 and max(map(len, lines)) <= 125, text
        for flag in re.findall(r"^ +(--\w+ \S+)", text, re.M):
            if changed := changed_by(flag, recipe):
                assert not contradictions(changed), flag
                assert changed != recipe, flag


SHORT = """
import runpy, sys
import torch
from transformers.models.llama.modeling_llama import LlamaMLP
from kit import step

train_step, plain, num_steps = step.train_step, LlamaMLP.forward, 0
def counted(*args):
    global num_steps
    num_steps += 1
    return train_step(*args)
def forward(self, hidden):
    return plain(self, hidden) if num_steps < 3 else torch.empty(1 << 50)
step.train_step, LlamaMLP.forward = counted, forward
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_the_script_ends_with_the_message_and_the_same_command_with_the_flag_goes_on(finetune, tmp_path):
    """Status 2 and no traceback; nothing is lost."""
    (tmp_path / "short.py").write_text(SHORT.format(script=str(ROOT / "recipes/finetune.py")))
    flags = {"per_device_train_batch_size": 8, "method": "full", "save_steps": 1}
    words = [f"--{name}={value}" for name, value in (finetune.defaults | flags).items()]
    run_ranks(str(tmp_path / "short"), [*words, f"--output_dir={tmp_path / 'run'}"], 1, log := tmp_path / "log.txt")
    text = log.read_text()
    assert log.with_suffix(".status").read_text() == "2" and "Traceback" not in text, text
    assert "\nerror: out of memory: 4.00 PiB asked for in the forward pass (LlamaMLP)\n" in text
    assert "--per_device_train_batch_size 4 " in text.split("these make it another run")[0]
    went_on = finetune.ok("run", **flags | {"per_device_train_batch_size": 4})
    assert "continuing after step 2 of 6" in went_on.output
