"""What fake tensors lack for a simulation of a run: an address, values, modules that move, weights to load, 4 bits.

Everything here changes torch, transformers and bitsandbytes in this process for good.
"""

from types import SimpleNamespace
from typing import Any

import bitsandbytes
import torch
import torch.distributed as dist
import transformers.utils.import_utils
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param, _fully_shard
from torch.nn.parallel import distributed as ddp
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.quantizers import AutoHfQuantizer

import kit.model.layers.activation_offload
import kit.model.layers.attention
from benchmarks.simulation.meter import Meter
from kit.model.experts.mxfp4 import GROUP, GROUP_BYTES
from kit.model.experts.packed import packable
from kit.model.experts.products import Routes
from kit.model.pretrained.classes import auto_class
from kit.model.pretrained.dequantise import in_mxfp4

OF_EXPERTS = {"compress_statistics": True, "quant_type": "nf4", "blocksize": 64}


def teach_fake_tensors(meter: Meter) -> None:
    """Let fake tensors pass through the code of a run."""
    # Then `torch.tensor(..., device="cuda")` makes a tensor of the host and copies it.
    FakeTensorMode.avoid_device_init = True  # type: ignore[assignment, method-assign]
    FakeTensor.data_ptr = _address  # type: ignore[method-assign]  # Accelerate distinguishes parameters by it
    FakeTensor.tolist = _tolist  # type: ignore[method-assign]
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    # Else transformers leaves out what waits for the device.
    transformers.utils.import_utils.is_fake_tensor = lambda x: False
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        auto.from_pretrained = staticmethod(make_model)  # type: ignore[method-assign, assignment]
    bitsandbytes.nn.modules.fix_4bit_weight_quant_state_from_module = _find_quant_state
    Routes.counts = property(_counts)  # type: ignore[assignment]
    meter.watch_resizes()
    for name in ("__init__", "__getitem__", "_flatten"):  # of the groups of hybrid sharding
        _with_real_tensors(device_mesh.DeviceMesh, name)
    _with_real_tensors(device_mesh, "init_device_mesh")
    _with_real_tensors(_fully_shard, "_init_default_mesh")
    _fsdp_init._move_states_to_device = _move  # type: ignore[assignment]
    # These two compare and copy values between ranks, in C++.
    ddp._verify_param_shape_across_processes = lambda *args, **kwargs: None
    ddp._sync_module_states = lambda *args, **kwargs: None
    _adapt_ddp()
    new_group = dist.new_group
    dist.new_group = lambda *args, **kwargs: new_group(*args, **kwargs | {"backend": "fake"})


def offload_to_host(meter: Meter) -> None:
    """Let FSDP2's offloading copy shards and gradients, where the CPU device stands for the GPU and for its host."""
    param: Any = _fsdp_param.FSDPParam
    inputs, to_dtensor = param.all_gather_inputs.fget, param.to_sharded_dtensor
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.is_pinned = lambda self, *args, **kwargs: True  # type: ignore[method-assign]

    def all_gather_inputs(self: Any) -> Any:
        shard = self._sharded_param_data
        self._sharded_param_data = shard.clone()  # on the GPU
        try:
            return inputs(self)
        finally:
            self._sharded_param_data = shard

    def to_sharded_dtensor(self: Any, tensor: Any) -> Any:
        if not hasattr(self, "sharded_param"):  # the parameter itself
            return to_dtensor(self, tensor)
        with meter.on_host():
            return to_dtensor(self, tensor.clone())

    param.all_gather_inputs = property(all_gather_inputs)
    param.to_sharded_dtensor = to_sharded_dtensor


def keep_inputs_on_host(meter: Meter) -> None:
    """Let layers' inputs that ``activation_offload`` copies out count as the host's, as in ``offload_to_host``."""

    def empty_on_host(tensor: Any) -> Any:
        with meter.on_host():
            return torch.empty_like(tensor)

    kit.model.layers.activation_offload.empty_on_host = empty_on_host


def take_kernels_of_cuda() -> None:
    """Let fake tensors on the CPU take the attention kernels of CUDA, or those that hold the same.

    Packs take CUDA's kernel for variable lengths. Rows take the CPU's flash attention, which torch chooses by itself;
    it holds what CUDA's flash and memory-efficient kernels hold. In float32, and in fp16, which stands for GPUs without
    bf16, heads of keys are repeated, as on CUDA.
    """
    computed_dtype = kit.model.layers.attention.computed_dtype
    kit.model.layers.attention.has_kernel = lambda query: computed_dtype(query) == torch.bfloat16
    kit.model.layers.attention.takes_groups = lambda key: kit.model.layers.attention.has_kernel(key)


def _address(self: Any) -> int:
    return int(self.untyped_storage()._cdata) + self.storage_offset() * self.element_size()


def _tolist(self: Any) -> Any:
    if self.constant is not None:
        return self.constant.tolist()
    host = self.cpu()  # the device is read once, not once an element
    return host.item() if not host.dim() else [_tolist(row) if row.dim() else row.item() for row in host]


def _counts(self: Any) -> list[int]:
    """As if all experts of a layer had the same number of tokens; the host waits once for that of each."""
    if "read" not in vars(self):
        self.read = self.ends.cpu()
    each, rest = divmod(len(self.experts), len(self.ends))
    return [each + (i < rest) for i in range(len(self.ends))]


def _move(parameters: list[Any], buffers: list[Any], device: torch.device) -> None:
    """Move tensors in place, before FSDP2 shards them. A fake tensor has its device beside its data."""
    for tensor in (*parameters, *buffers):
        if tensor.device.type not in (device.type, "meta"):
            tensor.data = tensor.detach().to(device)
            tensor.fake_device = device


def _find_quant_state(module: Any) -> None:
    """After FSDP has gathered a 4-bit weight, it is a plain parameter."""
    module.weight.quant_state = module.quant_state


def _with_real_tensors(owner: Any, name: str) -> None:
    """Let a function compute with real tensors, whose values it needs."""
    plain = getattr(owner, name)

    def function(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return plain(*args, **kwargs)

    setattr(owner, name, function)


def _adapt_ddp() -> None:
    """Let DDP run on the fake group."""
    plain = ddp.DistributedDataParallel.__init__

    def reduce(world, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations other than its own
        """As DDP's own hook in C++, for which the fake group returns no result."""
        buffer = bucket.buffer().div_(world)
        dist.all_reduce(buffer)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self.register_comm_hook(dist.get_world_size(), reduce)
        self.reducer = _Reducer(self.reducer)
        # The logger in C++ takes times from CUDA.
        self.logger = SimpleNamespace(set_runtime_stats_and_log=lambda: None)

    ddp.DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


class _Reducer:
    """DDP's reducer, which never sorts its buckets anew: for that, ranks exchange values in C++."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
    """``Module._apply`` that puts new parameters in place: torch's own would swap fake ones, which cannot be."""
    for module in self.children() if recurse else ():
        module._apply(fn)
    for name, parameter in self._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                changed = fn(parameter)
            if changed is not parameter:
                self._parameters[name] = torch.nn.Parameter(changed, parameter.requires_grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def make_model(
    name: str,
    *,
    config: Any,
    attn_implementation: str,
    dtype: torch.dtype,
    device_map: Any = None,
    quantization_config: Any = None,
    **options: Any,
) -> Any:
    """Stands in for ``from_pretrained``: the same model, its weights by shape."""
    device = device_map[""] if device_map else "cpu"
    with _disable_current_modes(), torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=dtype, attn_implementation=attn_implementation)
        if quantization_config:
            quantizer = AutoHfQuantizer.from_config(quantization_config, pre_quantized=False)
            quantizer.preprocess_model(model=model, device_map=device_map)
    made: dict[Any, Any] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                empty = torch.empty(parameter.shape, dtype=dtype, device=device)
                if key == "weight" and hasattr(module, "quant_state"):
                    made[parameter] = quantised(empty, module.weight)
                    module.quant_state = made[parameter].quant_state
                elif quantization_config and key in packable(module) and in_mxfp4(AutoConfig.from_pretrained(name)):
                    number, rows, columns = empty.shape
                    groups = empty.new_empty(number, columns, rows // GROUP, GROUP_BYTES, dtype=torch.uint8)
                    made[parameter] = torch.nn.Parameter(groups, requires_grad=False)
                elif quantization_config and key in packable(module):
                    made[parameter] = quantised(empty, SimpleNamespace(**OF_EXPERTS, quant_storage=dtype))
                else:
                    made[parameter] = torch.nn.Parameter(empty)
            module._parameters[key] = made[parameter]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    if quantization_config:
        quantizer.postprocess_model(model)
    return model.eval(), {"missing_keys": []}


def quantised(weight: Any, like: Any) -> Any:
    """Quantise ``weight`` by bitsandbytes' own code, whose kernels run by shape, as ``like`` says: a parameter."""
    packed, quant_state = bitsandbytes.functional.quantize_4bit(
        weight,
        compress_statistics=like.compress_statistics,
        quant_type=like.quant_type,
        quant_storage=like.quant_storage,
    )
    parameter: Any = torch.nn.Parameter(packed, requires_grad=False)
    parameter.__class__ = Params4bit
    for name in ("quant_type", "compress_statistics", "blocksize", "quant_storage"):
        setattr(parameter, name, getattr(like, name))
    parameter.quant_state, parameter.bnb_quantized = quant_state, True
    return parameter


class Params4bit(FakeTensor):
    """Stands in for bitsandbytes' parameter, which cannot be made of a fake tensor. Accelerate looks at its name."""

    # By these torch's state dict finds the parts of the quantisation state.
    absmax, code, quant_map, offset, state2, nested_absmax, nested_blocksize, nested_quant_map, nested_dtype = (
        getattr(bitsandbytes.nn.Params4bit, name)
        for name in (
            *("absmax", "code", "quant_map", "offset", "state2"),
            *("nested_absmax", "nested_blocksize", "nested_quant_map", "nested_dtype"),
        )
    )
