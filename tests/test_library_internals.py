"""What the kit relies on in other libraries without their promise: one list, and what no other test would notice.

To allow a newer version of a library, run this file with it first: in seconds it says what is gone. It reads the code
of the kit, and finds each name that is imported or reached from an import, whether each such call has arguments that
the function takes, and each private name. ``INTERNALS`` has the rest: names of objects, which only a run would reach.

Most of what the kit replaces or reads in a library is run by the tests of the file that does it. The other tests here
are for what only a GPU, a certain processor, a full memory or a long wait would show. No module of the kit is imported.
"""

import ast
import importlib
import inspect
import os
import re
from functools import cache, reduce
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

# By owner, a module or a class: private names of objects of a library, and public ones without documentation.
INTERNALS = {
    "datasets.Dataset": "_fingerprint",
    "peft.tuners.trainable_tokens.layer.TrainableTokensLayer": "_get_embed_scale token_indices trainable_tokens_delta",
    "peft.tuners.tuners_utils.BaseTunerLayer": "_disable_adapters cast_input_dtype_enabled active_adapters merged",
    "peft.utils.other.AuxiliaryTrainingWrapper": "_disable_adapters",
    "peft.utils.other.TrainableTokensWrapper": "_getattr_wrapped token_adapter",
    "torch.UntypedStorage": "_cdata",
    "torch._ops.OpOverload": "_overloadpacket _schema",
    "torch.distributed.ProcessGroup": "_get_sequence_number_for_group",
    "torch.distributed._shard.sharded_tensor.ShardedTensor": "_get_preferred_device",
    "torch.distributed.fsdp.FSDPModule": "_get_fsdp_state",
    "torch.distributed.fsdp.FullyShardedDataParallel": "_handle",
    "torch.distributed.fsdp._flat_param.FlatParamHandle": "flat_param",
    "torch.distributed.fsdp._flat_param.FlatParameter": "_params",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": "_unsharded_param unsharded_accumulated_grad",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": "_partial_reduce_output fsdp_params",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": "_fsdp_param_groups",
    "torch.ops.profiler": "_record_function_enter_new _record_function_exit",
    "torch.ops.profiler._record_function_exit": "_RecordFunction",
    "torch.optim.AdamW": "_init_group",
    "tqdm.tqdm": "_instances",
    "transformers.AutoModel": "_model_mapping",
    "transformers.PreTrainedConfig": "_attn_implementation _commit_hash _experts_implementation",
    "transformers.PreTrainedModel": (
        "_from_config _gradient_checkpointing_func _no_split_modules _supports_attention_backend _supports_sdpa"
    ),
    "transformers.models.mixtral.modeling_mixtral.MixtralExperts": "_apply_gate",
    "transformers.quantizers.quantizer_bnb_4bit.Bnb4BitHfQuantizer": "_process_model_after_weight_loading",
    "peft.tuners.lora.layer.ParamWrapper": "num_experts parameter_name",
    "transformers.ProcessorMixin": "_check_special_mm_tokens",
    "transformers.VoxtralProcessor": "_retrieve_input_features",
    "transformers.Qwen2VLProcessor": "_get_num_multimodal_tokens",
    "transformers.utils.hub.cached_files": (
        "_raise_exceptions_for_connection_errors _raise_exceptions_for_missing_entries"
    ),
}
# Made by the kit itself, and packages that the tests run without.
OURS = {"torch.ops.kit"}
NOT_INSTALLED = {"compressed_tensors", "llama_cpp", "llmcompressor", "math_verify", "rouge_score", "sacrebleu"}


def test_the_names_of_libraries_that_the_kit_reaches_from_an_import_exist():
    assert not [line for file in sources() for line in file.gone]


def test_what_the_kit_calls_by_name_takes_the_arguments_that_it_is_given():
    assert not [line for file in sources() for line in file.refused]


def test_the_internals_of_libraries_that_the_kit_uses_exist():
    missing = []
    for owner, names in INTERNALS.items():
        found = reached(owner)
        # What an object gets when it is made stands in the source of its class.
        missing += [f"{owner}: {n}" for n in names.split() if not hasattr(found, n) and not assigns(found, n)]
    assert not missing


def test_each_private_name_of_a_library_that_the_kit_uses_is_in_the_list():
    listed = {name for names in INTERNALS.values() for name in names.split()}
    private = {name: where for file in sources() for name, where in file.private.items()}
    assert not {name: private[name] for name in private.keys() - listed}, "add it to INTERNALS"
    assert not {name for name in listed if name.startswith("_")} - private.keys(), "the kit uses it no longer"


@cache
def sources() -> list["Source"]:
    files = [*(ROOT / "kit").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]
    return [Source(file) for file in sorted(files)]


class Source:
    """A file of the kit: the names of libraries in it that do not exist, calls that would fail, and private names."""

    def __init__(self, file: Path) -> None:
        self.file, self.gone, self.refused, self.private = file, [], [], {}
        nodes = list(ast.walk(ast.parse(file.read_text())))
        self.objects = dict(pair for node in nodes for pair in self.imported(node))  # by their names in the file
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        stored = [
            node for node in nodes if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store)
        ]
        own |= {each.id for each in stored if isinstance(each, ast.Name)}
        own |= {each.attr for each in stored if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self"}
        for node in nodes:
            if isinstance(node, ast.Call):
                self.call(node)
            if isinstance(node, ast.ClassDef):
                self.override(node)
            for name in self.names(node) - own:
                self.note(name, node)

    def imported(self, node: ast.AST):
        """The objects that an import gives names to."""
        if isinstance(node, ast.ImportFrom) and foreign(node.module):
            for alias in node.names:
                found = self.resolved(f"{node.module}.{alias.name}", node)
                yield alias.asname or alias.name, found
        if isinstance(node, ast.Import):
            for alias in node.names:
                if foreign(alias.name) and self.resolved(alias.name, node):
                    name = alias.asname or alias.name.split(".")[0]
                    yield name, reached(alias.name if alias.asname else name)

    def resolved(self, path: str, node: ast.AST):
        try:
            return reached(path)
        except (ImportError, AttributeError) as error:
            self.gone.append(f"{self.place(node)}: {path}: {error}")

    def of(self, node: ast.AST):
        """The object of a library that an expression names; None for any other."""
        if isinstance(node, ast.Name):
            return self.objects.get(node.id)
        if not isinstance(node, ast.Attribute) or (owner := self.of(node.value)) is None:
            return None
        if not hasattr(owner, node.attr) and ast.unparse(node.value) not in OURS:
            self.gone.append(f"{self.place(node)}: {ast.unparse(node)}")
        return getattr(owner, node.attr, None)

    def call(self, node: ast.Call) -> None:
        """Compare the arguments of a call with the function's."""
        function = self.of(node.func)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # of none, or not known
            return
        # A class in Rust shows the signature of no method, and defaults of the module itself look like none.
        if "self" in signature.parameters or inspect.getmodule(function) is inspect:
            return
        arguments = [each for each in node.args if not isinstance(each, ast.Starred)]
        named = {each.arg: each for each in node.keywords if each.arg}
        is_whole = len(arguments) + len(named) == len(node.args) + len(node.keywords)
        try:
            (signature.bind if is_whole else signature.bind_partial)(*arguments, **named)
        except TypeError as error:
            self.refused.append(f"{self.place(node)}: {ast.unparse(node.func)}: {error}")

    def override(self, node: ast.ClassDef) -> None:
        """Note the private methods of a library's class that a class of the kit replaces."""
        bases = [self.of(base) for base in node.bases]
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and any(hasattr(base, method.name) for base in bases if base):
                self.note(method.name, method)

    def names(self, node: ast.AST) -> set[str]:
        """The names of attributes and arguments in a node that no import of a library leads to."""
        if isinstance(node, ast.Attribute) and self.of(node) is None:
            return {node.attr}
        if isinstance(node, ast.Call):
            texts = [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)]
            reads = isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr")
            return {each.arg or "" for each in node.keywords} | set(texts if reads else ())
        return set()

    def note(self, name: str, node: ast.AST) -> None:
        if re.match(r"_(?!_|$|replace$)", name):  # that of a named tuple is documented
            self.private[name] = self.place(node)

    def place(self, node: ast.AST) -> str:
        return f"{self.file.relative_to(ROOT)}:{node.lineno}"


def foreign(module: str | None) -> bool:
    return module.split(".")[0] not in {*NOT_INSTALLED, "__future__", "kit", "recipes"}


@cache
def reached(path: str):
    """The module, or the object in one, that a dotted path names."""
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[i:], found)
    raise ImportError(path)


def assigns(found: object, name: str) -> bool:
    return bool(re.search(rf"\b{name}\b", inspect.getsource(found)))


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
    """kit/system/errors.py and kit/memory/out_of_memory.py match these messages."""
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
    """kit/memory/out_of_memory.py and kit/run/log.py; kit/model/layers/attention.py calls the kernel."""
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
