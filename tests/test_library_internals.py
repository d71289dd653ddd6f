"""What the kit relies on in other libraries without their having promised it: private names, replaced functions,
environment variables, words of messages.

Each test pins one such thing in the library itself and names what in the kit relies on it, so that an upgrade which
changes it fails here first. Nothing of the kit is imported.
"""

import functools
import importlib
import inspect
import json
import logging
import os
import re
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
RELIANT: set[str] = set()  # what of the kit the tests below name


def needed_by(*paths: str) -> Callable[[Any], Any]:
    """Add to the failure of a test which files or packages of the kit rely on what it pins."""
    RELIANT.update(paths)

    def decorate(test: Any) -> Any:
        @functools.wraps(test)
        def with_note(*args: Any, **kwargs: Any) -> Any:
            try:
                test(*args, **kwargs)
            except Exception as error:
                error.add_note(f"{', '.join(paths)} relies on this: {inspect.cleandoc(test.__doc__ or '')}")
                raise

        return with_note

    return decorate


def test_the_files_that_rely_on_an_internal_exist():
    assert not [path for path in RELIANT if not (ROOT / path).exists()]


@needed_by("kit/model/fp8_linear.py")
def test_rows_of_8_bit_floats_with_a_scale_each_are_multiplied_on_a_cpu_too():
    """torch._scaled_mm takes the second factor by columns, and scales of shape [N, 1] and [1, m]."""
    left, right = torch.eye(16, 32).to(torch.float8_e4m3fn), torch.ones(48, 32).to(torch.float8_e4m3fn)
    scales = torch.full((16, 1), 2.0), torch.arange(48.0)[None]
    found = torch._scaled_mm(left, right.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)
    assert torch.equal(found, (2 * torch.arange(48.0)).bfloat16().expand(16, 48))


class Layer(nn.Linear):
    """A layer to be sharded, with a method besides ``forward``."""

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def accelerate_state() -> Iterator[Any]:
    """Accelerate's module of states, as if it had not been used; afterwards it is as before."""
    from accelerate import state

    singletons = (state.PartialState, state.AcceleratorState, state.GradientState)
    before = [dict(each._shared_state) for each in singletons]
    with patch.dict(os.environ):
        for each in singletons:
            each._shared_state.clear()
        yield state
    for each, values in zip(singletons, before, strict=True):
        each._shared_state.clear()
        each._shared_state.update(values)


def tiny_llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(tiny_config(LlamaConfig), **options).eval()


def tiny_config(kind: Any) -> Any:
    shape = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2)
    return kind(vocab_size=32, num_hidden_layers=1, max_position_embeddings=64, bos_token_id=None, **shape, **heads)


def functions_of(error: BaseException) -> list[str]:
    """The functions through which ``error`` came, by module and name."""
    return [
        f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]


# --- torch: process groups, sharding, checkpoints


@needed_by("kit/failures/ranks.py")
def test_a_process_group_counts_its_collectives(group):
    """A hung rank is found by how many collectives it has begun, which only a private method returns."""
    count = dist.group.WORLD._get_sequence_number_for_group
    before = count()
    dist.all_reduce(torch.ones(1))
    assert count() == before + 1


@needed_by("kit/strategy/rendezvous.py")
def test_a_port_in_use_is_known_by_the_name_of_the_error():
    """A taken MASTER_PORT is for the user to fix, and known by EADDRINUSE in the message of a DistError."""
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        with pytest.raises(dist.DistError, match="EADDRINUSE"):
            dist.TCPStore("localhost", taken.getsockname()[1], is_master=True, wait_for_workers=False)
    assert issubclass(dist.DistStoreError, dist.DistError)


@needed_by("kit/config/kits/common.yaml")
@pytest.mark.slow
@pytest.mark.long
def test_ddp_with_a_static_graph_cannot_accumulate(group):
    """``static_graph`` is not offered, because with it a backward pass in ``no_sync`` fails. Where this passes no
    longer, offer it."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3), static_graph=True)
    with pytest.raises(RuntimeError, match="expect_autograd_hooks_"):
        for _ in range(2):
            with model.no_sync():
                model(torch.ones(2, 3)).sum().backward()
            model(torch.ones(2, 3)).sum().backward()


@needed_by("kit/strategy/parallelism.py")
@pytest.mark.slow
@pytest.mark.long
def test_accelerate_cannot_combine_tensor_parallelism_with_fsdp2():
    """It imports a class that transformers no longer has. Where this passes no longer, measure tp_size again."""
    from accelerate import Accelerator

    line = "from transformers.integrations.tensor_parallel import ReplicateParallel"
    assert line in inspect.getsource(Accelerator._prepare_tp)
    with pytest.raises(ImportError, match="ReplicateParallel"):
        exec(line)


@needed_by("kit/strategy/parallelism.py")
@pytest.mark.slow
@pytest.mark.long
def test_context_parallelism_of_accelerate_drops_masks():
    """So it would let packed samples see each other. Where this passes no longer, measure cp_size again."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    model, seen = tiny_llama(attn_implementation="sdpa"), []
    attention = model.model.layers[0].self_attn
    _attach_context_parallel_hooks(model)
    attention.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    model(torch.ones(1, 4, dtype=torch.long), attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))
    assert seen[0]["attention_mask"] is None and seen[0]["is_causal"]


@needed_by("kit/strategy/parallelism.py")
@pytest.mark.slow
@pytest.mark.long
def test_adapters_do_not_fit_weights_of_tensor_parallelism(tmp_path):
    """Therefore tp_size is refused. Where this passes no longer, measure it again."""
    tiny_llama().save_pretrained(tmp_path / "model")
    script = tmp_path / "script.py"
    script.write_text(f"""
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
torch.distributed.init_process_group("gloo")
divided = DistributedConfig(tp_size=2)
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}, distributed_config=divided)
model(torch.ones(1, 4, dtype=torch.long), use_cache=False)
print("without adapters", flush=True)
model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
model(torch.ones(1, 4, dtype=torch.long), use_cache=False)
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d"]
    command += ["--rdzv_endpoint=localhost:0", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode and "without adapters" in done.stdout, done.stderr
    assert "RuntimeError: shape" in done.stderr


@needed_by("kit/strategy/fsdp.py", "kit/strategy/weights.py", "kit/memory/shortage.py")
def test_fsdp2_keeps_a_module_and_puts_fsdp_before_the_name_of_its_class(group):
    """Sharded layers are counted, and named in messages, by the name of their class without FSDP."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
    from torch.distributed.tensor import DTensor

    layer: Any = fully_shard(Layer(4, 4), mesh=init_device_mesh("cpu", (1,)))
    assert isinstance(layer, Layer) and isinstance(layer, FSDPModule)
    assert type(layer).__name__ == "FSDPLayer"
    register_fsdp_forward_method(layer, "generate")
    assert "generate" in vars(layer), "a second registration is avoided by looking for the first one here"
    layer.set_reshard_after_forward(False, recurse=False)
    layer(torch.ones(1, 4))
    assert not isinstance(layer.weight, DTensor), "a gathered layer holds plain tensors"
    layer.reshard()
    assert isinstance(layer.weight, DTensor)


@needed_by("kit/strategy/gradients.py")
def test_fsdp2_keeps_what_it_has_not_yet_reduced_in_private_names(group):
    """Without a reduction in `unsharded_accumulated_grad`, and between copies in `_partial_reduce_output`: `zero_grad`
    does not know them, and the next backward pass adds to them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layer: Any = fully_shard(Layer(4, 4), mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("copies", "shards")))
    (group_of_parameters,) = layer._get_fsdp_state()._fsdp_param_groups
    layer.set_requires_all_reduce(False)
    layer(torch.ones(1, 4)).sum().backward()
    assert layer.bias.grad is None and group_of_parameters._partial_reduce_output is not None
    layer.set_requires_gradient_sync(False)
    layer(torch.ones(1, 4)).sum().backward()
    for p in group_of_parameters.fsdp_params:  # the first in another dtype than that of the weights
        assert p.unsharded_accumulated_grad is not None or p._unsharded_param.grad is not None


@needed_by("kit/strategy/weights.py", "kit/memory/shortage.py")
@pytest.mark.filterwarnings("ignore:FSDP is switching")
def test_fsdp1_hides_a_module_behind_a_flat_parameter(group):
    """Names lose `_fsdp_wrapped_module.`; what a rank keeps is read from `_handle.flat_param._params`."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    def wrap(module: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))

    model = wrap(nn.Sequential(wrap(Layer(4, 4))))
    names = [name for name, _ in model.named_parameters()]
    assert names == [f"_fsdp_wrapped_module.0._fsdp_wrapped_module.{name}" for name in ("weight", "bias")]
    unit: Any = model.module[0]  # type: ignore[index]
    assert isinstance(unit, FullyShardedDataParallel) and isinstance(unit.module, Layer)
    assert model._handle is None, "a unit without parameters of its own has no handle"
    assert [p.shape for p in unit._handle.flat_param._params] == [(4, 4), (4,)]


@needed_by("kit/strategy/weights.py")
def test_ddp_puts_module_before_names(group):
    """Plain names of parameters are those without `module.`."""
    from torch.nn.parallel import DistributedDataParallel

    assert next(name for name, _ in DistributedDataParallel(nn.Linear(2, 2)).named_parameters()) == "module.weight"


@needed_by("kit/checkpoint/save.py", "kit/checkpoint/tensor_files.py")
def test_a_distributed_checkpoint_is_safetensors_with_readable_shapes(tmp_path):
    """Nothing is unpickled: the Hugging Face storage writes safetensors only, flat in its folder, and its metadata
    has names and sizes."""
    import torch.distributed.checkpoint as dcp
    from safetensors import safe_open
    from torch.distributed.checkpoint import _hf_utils, planner_helpers
    from torch.distributed.checkpoint.metadata import MetadataIndex

    tensors = {"model.a": torch.arange(6.0).reshape(2, 3), "optimizer.b": torch.ones(4)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
    kept = tensors["model.a"].clone()
    tensors["model.a"].zero_()
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors"}
    with safe_open(next(tmp_path.iterdir()), "pt") as file:
        assert set(file.keys()) == set(tensors)
    reader = dcp.HuggingFaceStorageReader(str(tmp_path))
    stored: Any = reader.read_metadata().state_dict_metadata
    assert {name: tuple(entry.size) for name, entry in stored.items()} == {"model.a": (2, 3), "optimizer.b": (4,)}
    # What a reader of the kit's own makes of the headers.
    [chunk] = planner_helpers._create_chunk_list(tensors["model.a"])
    assert stored["model.a"].chunks == [chunk] and tuple(chunk.sizes) == (2, 3)
    place = reader.read_metadata().storage_data[MetadataIndex("model.a", chunk.offsets)]
    assert type(place) is _hf_utils._HFStorageInfo and place.relative_path == str(next(tmp_path.iterdir()))
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    assert torch.equal(tensors["model.a"], kept)


@needed_by("kit/checkpoint/save.py")
def test_a_failed_checkpoint_reports_rank_and_cause(tmp_path):
    """A full disk is reported with its rank: `failures` of a CheckpointException, by rank, first the cause."""
    import torch.distributed.checkpoint as dcp

    class Full(dcp.HuggingFaceStorageWriter):
        def write_data(self, *args: Any, **kwargs: Any) -> Any:
            raise OSError(28, "No space left on device")

    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({"a": torch.ones(1)}, storage_writer=Full(str(tmp_path)), no_dist=True)
    cause, *_ = caught.value.failures[0]
    assert isinstance(cause, OSError) and cause.errno == 28


@needed_by("kit/strategy/weights.py", "kit/checkpoint/load.py")
def test_the_state_of_what_trains_has_buffers_too():
    """`ignore_frozen_params` takes frozen parameters out of a state and leaves buffers in, quantisation tables among
    them: what is saved is chosen by the names of trainable parameters, which are the same in both."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
    model[0].weight.requires_grad_(True)
    state = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert "0.weight" in state and "0.bias" not in state and "1.running_mean" in state


# --- torch: launcher, memory, frames


@pytest.mark.slow
@needed_by("kit/strategy/launcher.py", "kit/strategy/launch.py", "kit/strategy/rendezvous.py")
def test_torchrun_sets_the_variables_that_the_kit_reads(tmp_path):
    """A restarted rank is known by torchrun's own variables; the flags are those the relaunch types."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import json, os, sys\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': sys.exit(1)\n"
        "json.dump(dict(os.environ), open(sys.argv[1], 'w'))\n"
    )
    flags = "--nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint localhost:0 --signals-to-handle SIGTERM,SIGUSR1"
    command = [sys.executable, "-m", "torch.distributed.run", *flags.split(), "--max_restarts", "1"]
    dump = tmp_path / "environment.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    done = subprocess.run(
        [*command, "--monitor_interval", "0.1", str(script), str(dump)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    variables = json.loads(dump.read_text())
    ranks = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID"
    assert set(ranks.split()) <= set(variables)
    expected = {"RESTART_COUNT": "1", "MAX_RESTARTS": "1", "USE_AGENT_STORE": "True"}
    assert {name: variables[f"TORCHELASTIC_{name}"] for name in expected} == expected


@needed_by("kit/strategy/launch.py")
def test_torchrun_waits_as_long_as_the_environment_says():
    """After a signal a step and its save need longer than the 30 seconds that torchrun gives by default."""
    from torch.distributed.launcher.api import LaunchConfig

    with patch.dict(os.environ, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="123"):
        assert LaunchConfig(1, 1, 1).shutdown_timeout == 123


@needed_by("kit/errors.py")
def test_messages_of_allocators_have_the_requested_bytes():
    """Out of memory is known by words of the allocators' messages."""
    import numpy as np

    with pytest.raises(RuntimeError, match=r"DefaultCPUAllocator: can't allocate memory.* allocate \d+ bytes"):
        torch.empty(1 << 55, dtype=torch.uint8)
    with pytest.raises(MemoryError, match=r"allocate [\d.]+ (GiB|TiB|PiB|EiB)"):
        np.empty(1 << 55, np.uint8)


@needed_by("kit/memory/shortage.py", "kit/run/throughput.py", "kit/strategy/weights.py")
def test_the_memory_of_any_accelerator_can_be_asked_for():
    """Only a machine with a GPU would otherwise notice that one of these is gone."""
    names = "is_available max_memory_allocated get_memory_info"
    assert not [name for name in names.split() if not hasattr(torch.accelerator, name)]


@needed_by("kit/phases.py")
def test_the_backward_pass_goes_through_a_function_of_that_name():
    """What a run was doing when memory ran out is known by the functions on the way, by module and name."""

    def refuse(grad: torch.Tensor) -> None:
        raise MemoryError

    x = torch.ones(1, requires_grad=True)
    x.register_hook(refuse)
    with pytest.raises(MemoryError) as caught:
        (2 * x).backward()
    assert "torch.autograd.backward" in functions_of(caught.value)


@needed_by("kit/phases.py")
@pytest.mark.parametrize(
    ("owner", "method", "name"),
    [
        ("accelerate.optimizer.AcceleratedOptimizer", "step", "accelerate.optimizer.step"),
        ("transformers.GenerationMixin", "generate", "transformers.generation.utils.generate"),
    ],
)
def test_functions_of_a_run_have_the_name_they_are_known_by(owner, method, name):
    """What a run was doing when memory ran out is known by the functions on the way, by module and name."""
    module, _, kind = owner.rpartition(".")
    function = inspect.unwrap(getattr(getattr(importlib.import_module(module), kind), method))
    assert f"{function.__globals__['__name__']}.{function.__code__.co_name}" == name


@needed_by("kit/model/attention.py")
def test_varlen_attention_takes_scale_window_and_shared_heads():
    """Packed attention gives it the bounds by position; the scale, the window and the sharing of heads by name."""
    from torch.nn.attention.varlen import varlen_attn

    parameters = list(inspect.signature(varlen_attn).parameters)
    assert parameters[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"scale", "window_size", "enable_gqa"} <= set(parameters)


@needed_by("kit/console.py")
@pytest.mark.parametrize(
    "name", ["bitsandbytes", "torch._higher_order_ops.wrap", "torch.distributed.fsdp._state_dict_utils"]
)
def test_loggers_that_are_silenced_are_those_of_their_modules(name):
    """Their remarks are silenced by the names of the loggers; under another name users would read them again."""
    module = importlib.import_module(name)
    loggers = [each for each in vars(module).values() if isinstance(each, logging.Logger)]
    assert not loggers or name in [each.name for each in loggers]


# --- accelerate


@needed_by("kit/strategy/fsdp.py")
def test_fsdp_can_be_forced_on_a_cpu(group, accelerate_state):
    """Accelerate offers no FSDP on a CPU; a rehearsal there writes the type and the plugin into its shared state."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import FSDPModule

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", state_dict_type="SHARDED_STATE_DICT"
    )
    plugin.transformer_cls_names_to_wrap = ["Layer"]
    accelerator = Accelerator(cpu=True)
    for singleton in (accelerate_state.PartialState, accelerate_state.AcceleratorState):
        singleton._shared_state["distributed_type"] = DistributedType.FSDP
    accelerate_state.AcceleratorState._shared_state["fsdp_plugin"] = plugin
    assert accelerator.distributed_type == DistributedType.FSDP and accelerator.is_fsdp2
    assert accelerator.state.fsdp_plugin is plugin
    model = nn.Sequential(Layer(4, 4))
    prepared, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert isinstance(prepared[0], FSDPModule)


@needed_by("kit/strategy/accelerator.py")
def test_the_device_can_be_said_in_the_environment(accelerate_state):
    """FSDP1 takes the device `cpu` and not `cpu:0`, which Accelerate would give a rank."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    with patch.dict(os.environ, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0"):
        try:
            assert str(accelerate_state.PartialState(cpu=True).device) == "cpu"
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@needed_by("kit/strategy/launch.py", "kit/strategy/accelerate_config.py")
def test_accelerate_launch_passes_the_strategy_in_variables_with_known_prefixes():
    """Without a config the topology is read from these variables; with one, all under these prefixes are dropped."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    def variables_of(words: str) -> dict[str, str]:
        arguments = launch_command_parser().parse_args([*words.split(), "script.py"])
        environment = (
            prepare_multi_gpu_env(arguments)
            if arguments.use_fsdp
            else prepare_simple_launcher_cmd_env(arguments)[1]  # the command, and the environment
        )
        return {name: value for name, value in environment.items() if os.environ.get(name) != value}

    common = "--num_machines 1 --mixed_precision bf16"
    fsdp = variables_of(
        f"{common} --num_processes 2 --use_fsdp --fsdp_version 2 --dynamo_backend no "
        "--fsdp_transformer_layer_cls_to_wrap Layer"
    )
    expected = {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "FSDP_VERSION": "2",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Layer",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_OFFLOAD_PARAMS": "false",
    }
    assert {name: fsdp.get(name) for name in expected} == expected
    single = variables_of(f"{common} --num_processes 1 --cpu --dynamo_backend inductor")
    assert single["ACCELERATE_USE_CPU"] == "True" and single["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"
    of_openmp = {"OMP_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME"}
    assert not [n for n in {*fsdp, *single} - of_openmp if not n.startswith(("ACCELERATE_", "FSDP_"))]


@needed_by("kit/run/log.py")
def test_a_tracker_is_given_its_own_settings_and_folder(accelerate_state, tmp_path):
    """A resumed run goes on with its curves: each tracker gets the settings under its name, and TensorBoard's folder is
    that of the project."""
    pytest.importorskip("tensorboard")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with=["tensorboard"], project_dir=str(tmp_path))
    accelerator.init_trackers("kit", init_kwargs={"tensorboard": {"purge_step": 3}, "wandb": {"id": "unused"}})
    (tracker,) = accelerator.trackers
    assert tracker.name == "tensorboard" and tracker.init_kwargs == {"purge_step": 3}
    assert (tmp_path / "kit").is_dir()
    tracker.finish()


# --- transformers


@needed_by("kit/data/chat/template.py")
def test_a_chat_template_compiles_into_a_sandbox_that_can_be_extended():
    """Templates are rendered in transformers' own environment, which nothing public gives: sandboxed, with the tag
    `generation`, and a date that the variables of a rendering may replace."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from transformers.utils.chat_template_utils import _compile_jinja_template

    source = "{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') }}"
    compiled = _compile_jinja_template(source)
    assert isinstance(compiled.environment, ImmutableSandboxedEnvironment)
    assert compiled.render(messages=["a", "b"], strftime_now=lambda form: "then") == "abthen"
    assert compiled.environment.overlay().from_string(source).render(messages=["a"]).startswith("a")


@needed_by("kit/model/loss_head.py")
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Olmo2"])
def test_the_forward_of_a_causal_model_is_decoder_then_head(family):
    """The loss head reads from the source what a family does between decoder and logits. Written otherwise, the family
    is still right, and takes full logits: slower and much larger."""
    import transformers

    source = inspect.getsource(getattr(transformers, f"{family}ForCausalLM").forward)
    lines = re.findall(r"^\s*(?:logits|hidden_states)\s*=(?!=)\s*(.+?)(?<!,)(?:\s*#.*)?$", source, re.MULTILINE)
    decoder = r"outputs(\.last_hidden_state|\[0\])"
    head = r"self\.lm_head\(hidden_states(\[:, slice_indices, :\])?\)"
    keep = r"slice_logits_to_keep\(hidden_states, logits_to_keep\)"
    assert lines and not [line for line in lines if not re.fullmatch(f"{decoder}|{head}|{keep}", line)]


@needed_by("kit/model/loss_head.py")
def test_the_parts_of_a_causal_model_are_found_and_replaced_on_the_instance():
    """The loss head replaces `forward` of a model and of its head on these instances, and calls the decoder alone."""
    model = tiny_llama()
    ids = torch.arange(4)[None]
    hidden = getattr(model, model.base_model_prefix)(input_ids=ids, use_cache=False).last_hidden_state
    assert torch.equal(model.get_output_embeddings()(hidden), model(input_ids=ids).logits)
    called = []
    plain = model.lm_head.forward
    model.lm_head.forward = lambda hidden: called.append(hidden.shape) or plain(hidden)
    model(input_ids=ids)
    assert called == [(1, 4, 16)]


@needed_by("kit/model/attention.py", "kit/model/loss_head.py")
def test_a_registered_attention_gets_its_mask_and_the_bounds_of_samples():
    """Packed attention has a name and a mask of its own. The mask function gets its arguments by name and may return an
    object, which reaches the attention function as it is; so do the bounds given to the model."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    class Mask:
        def __init__(self, **arguments: Any) -> None:
            self.arguments = arguments

    seen: dict[str, Any] = {}

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        seen.update(kwargs, mask=attention_mask)
        return sdpa_attention_forward(module, query, key, value, sdpa_mask(**attention_mask.arguments), **kwargs)

    AttentionInterface.register("sdpa_pinned", attend)
    AttentionMaskInterface.register("sdpa_pinned", Mask)
    ids = torch.arange(6)[None]
    borders = torch.tensor([0, 6], dtype=torch.int32)
    model = tiny_llama(attn_implementation="sdpa_pinned")
    assert model.config._attn_implementation == "sdpa_pinned"
    logits = model(input_ids=ids, use_cache=False, cu_seq_lens_q=borders, max_length_q=6).logits
    assert torch.equal(logits, tiny_llama(attn_implementation="sdpa")(input_ids=ids, use_cache=False).logits)
    assert isinstance(seen["mask"], Mask) and seen["mask"].arguments["attention_mask"] is None
    assert seen["cu_seq_lens_q"] is borders and seen["max_length_q"] == 6 and "scaling" in seen


@needed_by("kit/model/attention.py")
def test_a_name_with_sdpa_in_it_is_refused_where_sdpa_is():
    """A family that cannot take sdpa says so in `_supports_sdpa`, and is refused every name that contains the word."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Old(LlamaForCausalLM):
        _supports_sdpa = False

    assert LlamaForCausalLM._supports_sdpa
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        Old._from_config(tiny_config(LlamaConfig), attn_implementation="sdpa_pinned")


@needed_by("kit/train/isolation.py", "kit/data/feed/packing.py")
def test_positions_that_restart_keep_the_samples_of_a_pack_apart():
    """sdpa and eager know a pack by its positions alone, where no mask is given and no cache is used."""
    positions = torch.arange(4).repeat(2)[None]
    first, other, second = torch.randint(32, (3, 4), generator=torch.Generator().manual_seed(0))
    for name in ("sdpa", "eager"):
        model = tiny_llama(attn_implementation=name)
        one, two = (
            model(input_ids=torch.cat([each, second])[None], position_ids=positions, use_cache=False).logits[0, 4:]
            for each in (first, other)
        )
        assert torch.equal(one, two), name


@needed_by("kit/strategy/accelerator.py")
def test_a_family_declares_which_layers_are_sharded():
    """A config that names no layer class shards those of `_no_split_modules`."""
    model = tiny_llama()
    assert "LlamaDecoderLayer" in {type(module).__name__ for module in model.modules()} & set(model._no_split_modules)


@needed_by("kit/model/load.py")
def test_pickled_weights_are_opened_through_torch_load(tmp_path):
    """`use_safetensors` does not bind an index or an adapter that names pickled files: while weights are loaded,
    `torch.load` is replaced by what refuses, and so both libraries must look it up there."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaForCausalLM

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("pickled")

    model = tiny_llama()
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "model" / "shard.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(model.state_dict(), "shard.bin")}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    torch.save({}, tmp_path / "adapter" / "adapter_model.bin")
    with patch.object(torch, "load", refuse):
        with pytest.raises(PermissionError):
            LlamaForCausalLM.from_pretrained(tmp_path / "model", use_safetensors=True)
        with pytest.raises(PermissionError):
            PeftModel.from_pretrained(tiny_llama(), tmp_path / "adapter")


@needed_by("kit/model/load.py")
def test_an_adapter_beside_weights_is_loaded_without_being_asked(tmp_path):
    """It is refused, and known by `peft_config`."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    model = tiny_llama()
    model.save_pretrained(tmp_path)
    assert not model._hf_peft_config_loaded and not hasattr(model, "peft_config")
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path)
    adapted.save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert model._hf_peft_config_loaded and model.peft_config


@needed_by("kit/model/load.py")
def test_encoders_are_those_with_a_masked_language_model():
    """Encoders that open as causal models too are refused by their model_type in this table."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    assert "bert" in MODEL_FOR_MASKED_LM_MAPPING_NAMES and "llama" not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


# --- peft and bitsandbytes


@needed_by("kit/strategy/fsdp.py")
def test_adapters_get_units_of_their_own_under_fsdp1():
    """FSDP1 flattens a unit into one tensor: peft's policy wraps trainable leaves, and the layers that a variable
    names."""
    from peft import LoraConfig, get_peft_model
    from peft.utils.other import fsdp_auto_wrap_policy

    model: Any = get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"]))
    with patch.dict(os.environ, FSDP_TRANSFORMER_CLS_TO_WRAP="LlamaMLP"):
        policy = fsdp_auto_wrap_policy(model)
    wrapped = [
        name for name, module in model.named_modules() if policy(module=module, recurse=False, nonwrapped_numel=1)
    ]
    assert [name.rsplit(".", 2)[-2:] for name in wrapped] == [
        ["lora_A", "default"],
        ["lora_B", "default"],
        ["0", "mlp"],
    ]


@needed_by("kit/export/final.py")
def test_an_adapter_is_saved_under_the_names_of_its_modules():
    """An adapter that has learned nothing is known by `lora_B`; the first adapter of a model is called `default`."""
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"]))
    second = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert len(second) == 1 and not second[0].any() and list(model.peft_config) == ["default"]


@needed_by("kit/memory/shortage.py")
def test_the_tables_of_4_bit_weights_hang_on_their_module():
    """Memory of scales and tables is counted from the attributes of `quant_state`, nested ones by `absmax`."""
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(64, 64, compress_statistics=True, quant_type="nf4", quant_storage=torch.bfloat16)
    layer.load_state_dict(nn.Linear(64, 64).state_dict())
    layer = layer.to("cpu")
    layer(torch.ones(1, 64))
    state = vars(layer.weight.quant_state)
    assert isinstance(layer, nn.Linear) and layer.quant_state is layer.weight.quant_state
    assert torch.is_tensor(state["absmax"]) and torch.is_tensor(state["code"])
    assert torch.is_tensor(vars(state["state2"])["absmax"])
    assert layer.weight.dtype == torch.bfloat16


@needed_by("kit/strategy/sending.py")
def test_the_tables_of_4_bit_weights_are_five_tensors():
    """They are sent one by one, each set again where it was."""
    import bitsandbytes as bnb

    settings = {"compress_statistics": True, "quant_type": "nf4", "quant_storage": torch.bfloat16}
    _, state = bnb.functional.quantize_4bit(torch.randn(64, 64), **settings)
    for each, names in ((state, {"absmax", "code", "offset"}), (state.state2, {"absmax", "code"})):
        assert {name for name, value in vars(each).items() if torch.is_tensor(value)} == names
        assert not each.nested or each.state2 is not None


@needed_by("kit/model/four_bit.py")
def test_weights_can_be_quantised_on_another_device_than_they_are_loaded_to():
    """transformers' operation quantises a weight where it lies; bitsandbytes quantises by shape on meta, and keeps one
    table by name for the process."""
    import bitsandbytes as bnb
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(BitsAndBytesConfig(load_in_4bit=True))
    assert type(quantizer.get_quantize_ops()) is Bnb4bitQuantize
    assert ".to(value.device)" in inspect.getsource(Bnb4bitQuantize.convert)
    bnb.functional.name2qmap.setdefault("dynamic", bnb.functional.create_dynamic_map())
    packed, state = bnb.functional.quantize_4bit(torch.empty(64, 64, device="meta"), compress_statistics=True)
    assert packed.is_meta and state.absmax.is_meta and state.state2.code.is_meta


@needed_by("kit/model/load.py")
def test_repacking_of_4_bit_weights_on_a_cpu_can_be_switched_off():
    """At the first evaluation on a CPU with AVX512 weights would be repacked: other bits, and not for every shape."""
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(64, 64)
    assert hasattr(layer, "support_avx512bf16_for_cpu")
    assert "self.support_avx512bf16_for_cpu" in inspect.getsource(bnb.nn.Linear4bit.forward)


@needed_by("kit/checkpoint/load.py", "kit/memory/shortage.py")
def test_8_bit_moments_have_tables_that_parameters_share():
    """They are copied before they are saved, known by `qmap`; tensors below 4,096 elements keep whole moments; in a
    state dict the 8-bit ones stand one level deeper."""
    import bitsandbytes as bnb

    large, other, small = (nn.Parameter(torch.ones(size)) for size in (4096, 4096, 4095))
    optimizer = bnb.optim.AdamW8bit([large, other, small])
    for parameter in (large, other, small):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.state[large]["qmap1"] is optimizer.state[other]["qmap1"]
    assert {name for name in optimizer.state[large] if name.startswith("qmap")} == {"qmap1", "qmap2"}
    assert optimizer.state[large]["state1"].dtype == torch.uint8
    assert optimizer.state[small]["state1"].dtype == torch.float32
    assert any(isinstance(value, dict) for value in optimizer.state_dict()["state"][0].values())


# --- datasets and the hub


@needed_by("kit/data/read/hub.py")
def test_a_data_set_without_files_has_a_fingerprint():
    """What is read from files is known by them; what is in memory only, by a private fingerprint."""
    from datasets import Dataset

    one, other = Dataset.from_dict({"a": [1]}), Dataset.from_dict({"a": [2]})
    assert one.cache_files == [] and one._fingerprint and one._fingerprint != other._fingerprint


@needed_by("kit/data/read/hub.py", "kit/data/read/tables.py")
def test_a_saved_data_set_lists_its_files_and_gives_arrow(tmp_path):
    """Files are digested by their names in `cache_files`; a folder that was saved is known by its JSON files."""
    import datasets
    import pyarrow

    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"a": [1, 2, 3]})}).save_to_disk(tmp_path)
    assert json.loads((tmp_path / "dataset_dict.json").read_text())["splits"] == ["train"]
    assert (tmp_path / "train" / "state.json").is_file()
    saved: Any = datasets.load_from_disk(tmp_path / "train")
    assert [Path(entry["filename"]).is_file() for entry in saved.cache_files] == [True]
    tables = list(saved.with_format("arrow").iter(2))
    assert all(isinstance(table, pyarrow.Table) for table in tables) and sum(map(len, tables)) == 3


@needed_by("kit/data/read/hub.py")
@pytest.mark.parametrize(
    ("config", "split", "streaming", "message"),
    [
        (None, "train", False, r"available configs.*\[('[^\[\]]*')\]"),
        ("three", "train", False, r"^BuilderConfig .*\[('[^\[\]]*')\]"),
        ("one", "trian", False, r"^Unknown split .*\[('[^\[\]]*')\]"),
        ("one", "trian", True, r"^Bad split.*\[('[^\[\]]*')\]"),
    ],
)
def test_the_message_lists_the_choices(tmp_path, config, split, streaming, message):
    """A config or split that is missing or mistyped is answered with the names in the library's own message."""
    import datasets

    configs = "\n".join(f"- config_name: {name}\n  data_files: {name}.jsonl" for name in ("one", "two"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}\n---\n")
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ValueError) as caught:
        datasets.load_dataset(
            str(tmp_path), config, split=split, streaming=streaming, cache_dir=str(tmp_path / "cache")
        )
    assert re.search(message, str(caught.value), re.DOTALL), caught.value


@needed_by("kit/model/locate.py")
def test_the_hubs_cache_has_commits_and_knows_absent_files(tmp_path):
    """It answers the path of a file, whose folder is named after the commit; None for one that was never asked for; and
    something true that is not a string for one that is known to be absent, which need not be asked for again."""
    from huggingface_hub import try_to_load_from_cache

    repository, commit = tmp_path / "models--some--model", "0123456789abcdef0123456789abcdef01234567"
    for folder in ("refs", f"snapshots/{commit}", f".no_exist/{commit}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit / "config.json").write_text("{}")
    (repository / ".no_exist" / commit / "absent.json").touch()
    found, absent, unknown = (
        try_to_load_from_cache("some/model", name, cache_dir=tmp_path)
        for name in ("config.json", "absent.json", "unknown.json")
    )
    assert isinstance(found, str) and Path(found).parent.name == commit
    assert absent and not isinstance(absent, str)
    assert unknown is None


@needed_by("kit/run/profile.py")
def test_the_history_of_cudas_allocator_is_recorded_and_written_by_two_private_functions():
    """``--profile_steps`` begins and ends the history, and writes it to a file."""
    record = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert next(iter(record)) == "enabled" and "max_entries" in record
    assert next(iter(inspect.signature(torch.cuda.memory._dump_snapshot).parameters)) == "filename"
