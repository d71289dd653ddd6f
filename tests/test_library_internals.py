"""What the kit relies on in other libraries without their promise, where no other test would notice a change.

Most of what the kit replaces or reads in a library is run by the tests of the file that does it. Here is the rest: what
only a GPU, a certain processor, a full memory or a long wait would show. Nothing of the kit is imported.
"""

import inspect
import os
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch


def test_torchrun_waits_as_long_as_the_environment_says():
    """kit/strategy/launch/launch.py: after a signal a step and its save need longer than torchrun's 30 seconds."""
    from torch.distributed.launcher.api import LaunchConfig

    with patch.dict(os.environ, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="123"):
        assert LaunchConfig(1, 1, 1).shutdown_timeout == 123


def test_accelerate_launch_passes_the_strategy_in_variables_with_known_prefixes():
    """kit/strategy/launch/ reads the topology from these variables, and drops all under the prefixes for a config."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    def variables_of(words, prepare):
        prepared = prepare(launch_command_parser().parse_args([*words.split(), "script.py"]))
        environment = prepared[1] if isinstance(prepared, tuple) else prepared  # after the command
        return {name: value for name, value in environment.items() if os.environ.get(name) != value}

    common = "--num_machines 1 --mixed_precision bf16"
    sharded = "--num_processes 2 --use_fsdp --fsdp_version 2 --dynamo_backend no --fsdp_transformer_layer_cls_to_wrap L"
    fsdp = variables_of(f"{common} {sharded}", prepare_multi_gpu_env)
    expected = {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "FSDP_VERSION": "2",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "L",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_OFFLOAD_PARAMS": "false",
    }
    assert {name: fsdp.get(name) for name in expected} == expected
    single = variables_of(f"{common} --num_processes 1 --cpu --dynamo_backend no", prepare_simple_launcher_cmd_env)
    assert single["ACCELERATE_USE_CPU"] == "True"
    of_openmp = {"OMP_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME"}
    assert not [n for n in {*fsdp, *single} - of_openmp if not n.startswith(("ACCELERATE_", "FSDP_"))]


def test_messages_of_allocators_have_the_requested_bytes():
    """kit/system/errors.py and shortage.py know by these words that memory ran out, and what was asked for."""
    import numpy as np

    with pytest.raises(RuntimeError, match=r"DefaultCPUAllocator: can't allocate memory.* allocate \d+ bytes"):
        torch.empty(1 << 55, dtype=torch.uint8)
    with pytest.raises(MemoryError, match=r"allocate [\d.]+ (GiB|TiB|PiB|EiB)"):
        np.empty(1 << 55, np.uint8)
    library = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"
    if library.exists():  # in a CUDA build of torch alone; "this process has" is put together from two
        text = library.read_bytes()
        words = (b"Tried to allocate ", b" total capacity of ", b" of which ", b" is free", b"this process")
        more = (b" is allocated by PyTorch", b" is reserved by PyTorch but unallocated")
        assert not [each for each in (*words, *more) if each not in text]


def test_what_only_a_gpu_calls_exists_with_the_arguments_it_is_given():
    """kit/memory/shortage.py and kit/run/log.py; kit/model/layers/attention.py calls the kernel."""
    from torch.nn.attention.varlen import varlen_attn

    names = "is_available current_device_index max_memory_allocated memory_allocated memory_reserved get_memory_info"
    assert not [name for name in names.split() if not hasattr(torch.accelerator, name)]
    parameters = list(inspect.signature(varlen_attn).parameters)
    assert parameters[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"scale", "window_size", "enable_gqa"} <= set(parameters)


def test_4_bit_weights_can_be_quantised_elsewhere_than_they_are_loaded_to():
    """kit/model/four_bit.py: transformers' operation quantises a weight where it lies; bitsandbytes quantises by shape
    on meta, and keeps one table by name for the process."""
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


def test_repacking_of_4_bit_weights_on_a_cpu_can_be_switched_off():
    """kit/model/build.py: on a CPU with AVX512 the first evaluation would repack weights: other bits."""
    import bitsandbytes as bnb

    assert hasattr(bnb.nn.Linear4bit(64, 64), "support_avx512bf16_for_cpu")
    assert "self.support_avx512bf16_for_cpu" in inspect.getsource(bnb.nn.Linear4bit.forward)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Olmo2"])
def test_the_forward_of_a_causal_model_is_decoder_then_head(family):
    """loss_head.py reads from the source what a family does between decoder and logits. Written otherwise,
    the family is still right, and takes full logits: slower and much larger."""
    import transformers

    source = inspect.getsource(getattr(transformers, f"{family}ForCausalLM").forward)
    lines = re.findall(r"^\s*(?:logits|hidden_states)\s*=(?!=)\s*(.+?)(?<!,)(?:\s*#.*)?$", source, re.MULTILINE)
    decoder = r"outputs(\.last_hidden_state|\[0\])"
    head = r"self\.lm_head\(hidden_states(\[:, slice_indices, :\])?\)"
    keep = r"slice_logits_to_keep\(hidden_states, logits_to_keep\)"
    assert lines and not [line for line in lines if not re.fullmatch(f"{decoder}|{head}|{keep}", line)]
