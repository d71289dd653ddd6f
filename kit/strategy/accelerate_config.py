"""Read and validate Accelerate config files.

The kit takes topology and precision from a config, nothing else. A mistyped key is an error, and so is a setting that
the kit does not support. Keys for Accelerate's own saving and prefetching are accepted but have no effect, since the
kit saves by itself. The environment variables that a launcher sets are validated in the same way. Plain Python.
"""

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from kit.config.hints import other_kind
from kit.config.other_kits import FP16, other_kits_word
from kit.config.recipe_file import read_yaml
from kit.durable import read_small
from kit.errors import Problem, UserError, did_you_mean, raise_if
from kit.strategy.parallelism import PREFIX, GroupSizes, group_sizes, hint_for_key
from kit.strategy.strategies import Strategy, StrategyName
from kit.strategy.topology import Precision

_CONFIG_KEYS = """
compute_environment debug distributed_type downcast_bf16 enable_cpu_affinity fsdp_config gpu_ids machine_rank
main_process_ip main_process_port main_training_function mixed_precision num_machines num_processes
rdzv_backend same_network tpu_env tpu_use_cluster tpu_use_sudo use_cpu dynamo_config parallelism_config
""".split()
_FSDP_KEYS = """
fsdp_version fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_reshard_after_forward
fsdp_sharding_strategy fsdp_offload_params fsdp_cpu_ram_efficient_loading fsdp_state_dict_type
fsdp_use_orig_params fsdp_sync_module_states fsdp_backward_prefetch fsdp_forward_prefetch
fsdp_activation_checkpointing
""".split()
# The kit compiles by layer, in whole graphs and for all lengths, whatever the last three say.
_DYNAMO_KEYS = (
    "dynamo_backend dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph dynamo_use_regional_compilation".split()
)
# Accelerate's other ways to distribute a run, and the keys of its config that only they read.
_DEEPSPEED = "DeepSpeed's ZeRO shards what FSDP2 shards, in a loop of its own; use --config {} (docs/parallelism.md)"
_MEGATRON = (
    "Megatron-LM trains models written for it, this kit those of transformers; use --config fsdp (docs/parallelism.md)"
)
_TPU = "TPUs need torch_xla, with which this kit was never run; use GPUs, or --config single with use_cpu: true"
_FP8 = "fp8 is a setting of the recipe: --fp8 true, with mixed_precision: bf16 in the config"
_OTHER_KINDS = {"DEEPSPEED": _DEEPSPEED, "MEGATRON_LM": _MEGATRON, "XLA": _TPU, "TPU": _TPU}
_OTHER_KEYS = {"deepspeed_config": _DEEPSPEED, "megatron_lm_config": _MEGATRON, "fp8_config": _FP8} | dict.fromkeys(
    "tpu_name tpu_zone tpu_vm command_file commands".split(), _TPU
)
_PRECISIONS = {"fp16": FP16, "fp8": _FP8}


@dataclass(frozen=True, kw_only=True)
class AccelerateConfig:
    """What an Accelerate config, or a launcher, asks for. Nothing here depends on the machine."""

    strategy: Strategy
    mixed_precision: Precision
    num_processes: int | None  # over all machines; None: one per GPU
    num_machines: int
    use_cpu: bool
    layer_classes: tuple[str, ...]  # classes to shard; empty: the model's own decoder layer
    reshard_after_forward: bool
    load_on_rank0: bool
    groups: GroupSizes = field(default_factory=GroupSizes)  # of hybrid sharding
    main_process_ip: str | None = None  # by which other machines reach the one of rank 0
    main_process_port: int | None = None
    compiles: bool = False  # whether it has a ``dynamo_config``, which asks for compiled layers


def _refuse_deepspeed(path: Path, values: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for a JSON of DeepSpeed."""
    if "zero_optimization" in values:
        expected = "an Accelerate config"
        fix = "--config fsdp; or --config fsdp_offload; or --config ddp"
        raise UserError(Problem("--config", f"{path} is a file of DeepSpeed", expected, fix))


def read_config(path: Path) -> AccelerateConfig:
    """Read and validate an Accelerate config file. Raises ``UserError`` with every problem of the file."""
    values, lines = read_yaml(path)
    if problem := other_kind(values, "config", path):
        raise UserError(problem)
    _refuse_deepspeed(path, values)
    if not {*_CONFIG_KEYS, *_OTHER_KEYS} & set(values) and any(map(other_kits_word, map(str, values))):
        fix = f"--recipe {shlex.quote(str(path))} instead of --config"
        raise UserError(Problem("--config", f"{path} has only keys of a recipe", "an Accelerate config", fix))
    fsdp = values.get("fsdp_config") or {}
    problems = []
    text = read_small(path).splitlines()

    def where(key: str) -> str:
        inner = re.compile(rf"[\s{{'\"]*{re.escape(key.rpartition('.')[2])}['\"]?\s*:")
        line = lines.get(key) or next((number for number, line in enumerate(text, 1) if inner.match(line)), None)
        return f"{path}:{line} {key}" if line else f"{path} {key}"

    for key in values:
        if key in _OTHER_KEYS:
            if values[key] and _OTHER_KEYS[key] != _OTHER_KINDS.get(str(values.get("distributed_type"))):
                fix = _OTHER_KEYS[key].format("fsdp") + ", or remove these lines"
                problems.append(Problem(where(key), "not offered", fix=fix))
        elif key not in _CONFIG_KEYS:
            hint = hint_for_key(key) or did_you_mean(key, _CONFIG_KEYS)
            problems.append(Problem(where(key), "not a key of an Accelerate config", fix=hint))
    if not isinstance(fsdp, dict):
        raise UserError(*problems, Problem(where("fsdp_config"), f"found {fsdp!r}", "a mapping of fsdp_ keys"))
    for key in fsdp:
        if key not in _FSDP_KEYS:
            hint = did_you_mean(str(key), _FSDP_KEYS) or "remove it"
            problems.append(Problem(where(f"fsdp_config.{key}"), "not a key this kit reads", fix=hint))
    gpu_ids = str(values.get("gpu_ids", "all"))
    if gpu_ids != "all":  # only the launcher can hide GPUs from the process
        fix = f"put CUDA_VISIBLE_DEVICES={gpu_ids} in front of the command"
        problems.append(Problem(where("gpu_ids"), f"found {gpu_ids!r}", "all", fix))
    return make_config(values, fsdp, where, problems)


def make_config(
    values: dict[str, Any], fsdp: dict[str, Any], where: Callable[[str], str], problems: list[Problem]
) -> AccelerateConfig:
    """Validate the values of a config.

    Args:
        values: the top-level keys.
        fsdp: the keys of ``fsdp_config``.
        where: returns what to call a key in a message, such as ``file:line key``.
        problems: those found so far.

    Raises:
        UserError: with all problems.
    """

    def refuse(key: str, found: Any, expected: str, fix: str = "") -> None:
        problems.append(Problem(where(key), f"found {found!r}", expected, fix))

    def switch(key: str, default: bool) -> bool:
        value = str(fsdp.get(key, default)).lower()
        if value not in ("true", "false"):
            refuse(f"fsdp_config.{key}", fsdp[key], "true or false")
        return value == "true"

    # YAML reads an unquoted `NO` as false.
    kind = str(values.get("distributed_type") or "NO")
    version = str(fsdp.get("fsdp_version", 1))
    kinds: dict[str, StrategyName] = {
        "NO": "single",
        "MPS": "single",
        "MULTI_GPU": "ddp",
        "MULTI_CPU": "ddp",
        "FSDP": "fsdp2",
    }
    if kind not in kinds:
        fix = _OTHER_KINDS.get(kind, "this kit was never run on such devices")
        refuse("distributed_type", kind, "NO, MULTI_GPU or FSDP", fix.format(_like_deepspeed(values)))
    name = kinds.get(kind, "single")
    if kind == "FSDP" and version not in ("1", "2"):
        refuse("fsdp_config.fsdp_version", version, "1 or 2")
    if kind == "FSDP" and version == "1":
        name = "fsdp1"
    precision = str(values.get("mixed_precision") or "no")
    if precision not in ("no", "bf16"):
        refuse("mixed_precision", precision, "no or bf16", _PRECISIONS.get(precision, ""))
    if kind == "FSDP":
        policy = str(fsdp.get("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"))
        if policy != "TRANSFORMER_BASED_WRAP":
            refuse(
                "fsdp_config.fsdp_auto_wrap_policy",
                policy,
                "TRANSFORMER_BASED_WRAP",
                "each decoder layer is one unit",
            )
        if switch("fsdp_activation_checkpointing", False):
            refuse(
                "fsdp_config.fsdp_activation_checkpointing",
                True,
                "false",
                "use --gradient_checkpointing: this one gives wrong gradients with dropout",
            )
    if name == "fsdp1" and not switch("fsdp_use_orig_params", True):
        refuse("fsdp_config.fsdp_use_orig_params", False, "true", "frozen and trained weights share a unit")
    dynamo = values.get("dynamo_config") or {}
    if not isinstance(dynamo, dict):
        refuse("dynamo_config", dynamo, "a mapping of dynamo_ keys")
        dynamo = {}
    for key in dynamo:
        if key not in _DYNAMO_KEYS:
            refuse(f"dynamo_config.{key}", dynamo[key], "dynamo_backend: INDUCTOR")
    backend = str(dynamo.get("dynamo_backend") or "NO").upper()  # YAML reads an unquoted `NO` as false
    if backend not in ("NO", "INDUCTOR"):
        refuse("dynamo_config.dynamo_backend", dynamo["dynamo_backend"], "INDUCTOR or NO")
    if str(dynamo.get("dynamo_mode", "default")) != "default":
        refuse("dynamo_config.dynamo_mode", dynamo["dynamo_mode"], "default")
    groups = group_sizes(values.get("parallelism_config") or {}, name, refuse)
    count = values.get("num_processes")
    if count is not None and (type(count) is not int or count == 0 or count < -1):
        refuse("num_processes", count, "a whole number from 1, or no such line: one per GPU")
    num_machines = values.get("num_machines") or 1
    if type(num_machines) is not int or num_machines < 1:
        refuse("num_machines", num_machines, "a whole number from 1")
    port = values.get("main_process_port")
    if port is not None and not (str(port).isdecimal() and int(port) < 65536):
        refuse("main_process_port", port, "a whole number below 65536")
    use_cpu = str(values.get("use_cpu") or False).lower()
    if use_cpu not in ("true", "false", "none"):
        refuse("use_cpu", values["use_cpu"], "true or false")
    sharding = str(fsdp.get("fsdp_sharding_strategy", "FULL_SHARD"))
    if name == "fsdp1" and sharding not in ("FULL_SHARD", "SHARD_GRAD_OP", "1", "2"):
        refuse("fsdp_config.fsdp_sharding_strategy", sharding, "FULL_SHARD or SHARD_GRAD_OP")
    fsdp1_reshard = sharding in ("FULL_SHARD", "1")
    reshard = switch("fsdp_reshard_after_forward", True) if name == "fsdp2" else fsdp1_reshard
    offloads = switch("fsdp_offload_params", False) and kind == "FSDP"
    load_on_rank0 = switch("fsdp_cpu_ram_efficient_loading", True) and kind == "FSDP"
    raise_if(problems)
    classes = fsdp.get("fsdp_transformer_layer_cls_to_wrap") or ""
    names = classes if isinstance(classes, list) else str(classes).split(",")
    return AccelerateConfig(
        strategy=Strategy(name, offloads=offloads, replicates=groups != GroupSizes()),
        mixed_precision=cast(Precision, precision),
        num_processes=count if count and count > 0 else None,
        num_machines=num_machines,
        use_cpu=use_cpu == "true",
        layer_classes=tuple(str(name).strip() for name in names if str(name).strip()),
        reshard_after_forward=reshard,
        load_on_rank0=load_on_rank0,
        groups=groups,
        main_process_ip=str(values["main_process_ip"]) if values.get("main_process_ip") else None,
        main_process_port=None if port is None else int(port),
        compiles=backend == "INDUCTOR",
    )


def _like_deepspeed(values: dict[str, Any]) -> str:
    """The config of this kit that holds on each GPU what this DeepSpeed config holds there."""
    deepspeed = values.get("deepspeed_config")
    deepspeed = deepspeed if isinstance(deepspeed, dict) else {}
    devices = [str(deepspeed.get(f"offload_{what}_device") or "none") for what in ("param", "optimizer")]
    if set(devices) != {"none"}:
        return "fsdp_offload"
    return "ddp" if str(deepspeed.get("zero_stage", 3)) == "0" else "fsdp"


def config_from_environment() -> AccelerateConfig:
    """Read the config from the environment variables that `accelerate launch` or torchrun sets.

    Raises:
        UserError: with all settings that the kit does not support.
    """
    env = os.environ
    kind = "MULTI_GPU" if "RANK" in env else "NO"
    if env.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        kind = "DEEPSPEED"
    if env.get("ACCELERATE_USE_MEGATRON_LM", "").lower() == "true":
        kind = "MEGATRON_LM"
    fsdp = {}
    if env.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        kind = "FSDP"
        names = {"TRANSFORMER_CLS_TO_WRAP": "fsdp_transformer_layer_cls_to_wrap"}
        fsdp = {
            names.get(key[5:], key.lower()): value
            for key, value in env.items()
            if key.startswith("FSDP_") and value.lower() not in ("", "none")
        }
    values = {
        "distributed_type": kind,
        "mixed_precision": env.get("ACCELERATE_MIXED_PRECISION", "no"),
        "fsdp_config": fsdp,
    }
    if env.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO":
        names = {f"ACCELERATE_{key.upper()}": key for key in ("dynamo_backend", "dynamo_mode")}
        values["dynamo_config"] = {names[name]: env[name] for name in names if name in env}
    if env.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        # The launcher passes 1 on for each size that its config does not have.
        sizes = {key.lower(): value for key, value in env.items() if key.startswith(PREFIX.upper()) and value != "1"}
        values["parallelism_config"] = sizes
    values["use_cpu"] = env.get("ACCELERATE_USE_CPU", "false")
    return make_config(values, fsdp, lambda key: f"the launcher's {key}", [])
