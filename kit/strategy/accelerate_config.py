"""Read and validate Accelerate config files.

The kit reads topology and precision from a config, nothing else. A mistyped key is an error, and so is a setting that
the kit does not support. Keys for Accelerate's own saving and prefetching are accepted but have no effect, since the
kit saves by itself. The environment variables that a launcher sets are validated in the same way. Plain Python.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from kit.config.recipe_file import read_yaml
from kit.strategy.parallelism import NOT_OFFERED, PREFIX, GroupSizes, group_sizes
from kit.strategy.strategies import Strategy, StrategyName
from kit.strategy.topology import Precision
from kit.system.errors import Problem, UserError, did_you_mean, raise_if

_KINDS: dict[str, StrategyName] = {
    "no": "single",
    "mps": "single",
    "multi_gpu": "ddp",
    "multi_cpu": "ddp",
    "fsdp": "fsdp2",
}
_OTHER_ENGINES = "DeepSpeed, Megatron-LM and TPUs are not supported: --config fsdp; docs/distributed.md says why"


@dataclass(frozen=True)
class _Key:
    """A key of a config with one of a few values, in any case; the first one is the default."""

    values: tuple[str, ...]
    fix: str = ""


_SECTIONS = ("fsdp_config", "dynamo_config", "parallelism_config")
_KEYS = {
    "distributed_type": _Key(tuple(_KINDS), _OTHER_ENGINES),
    "mixed_precision": _Key(("no", "bf16", "fp16"), "fp8 is --fp8 true, with bf16 here"),
    "use_cpu": _Key(("false", "true")),
    "gpu_ids": _Key(("all",), "put CUDA_VISIBLE_DEVICES=... in front of the command"),  # only a launcher can hide GPUs
    "fsdp_config.fsdp_version": _Key(("1", "2")),
    "fsdp_config.fsdp_auto_wrap_policy": _Key(("transformer_based_wrap",), "each decoder layer is one FSDP unit"),
    "fsdp_config.fsdp_activation_checkpointing": _Key(
        ("false",), "use --gradient_checkpointing: this one gives wrong gradients with dropout"
    ),
    "fsdp_config.fsdp_offload_params": _Key(("false", "true")),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": _Key(("true", "false")),
    "fsdp_config.fsdp_reshard_after_forward": _Key(("true", "false", "full_shard", "shard_grad_op")),
    "fsdp_config.fsdp_sharding_strategy": _Key(("full_shard", "shard_grad_op", "1", "2")),
    "fsdp_config.fsdp_use_orig_params": _Key(("true",), "frozen and trained weights share an FSDP unit"),
    "dynamo_config.dynamo_backend": _Key(("no", "inductor")),
    "dynamo_config.dynamo_mode": _Key(("default",)),
    **{f"parallelism_config.{PREFIX}{name}": _Key(("1",), reason) for name, reason in NOT_OFFERED.items()},
}
# Keys with a whole number: the least one.
_NUMBERS = {"num_processes": -1, "num_machines": 1, "main_process_port": 0} | {
    f"parallelism_config.{PREFIX}{name}": 1 for name in ("dp_replicate_size", "dp_shard_size", "sp_size")
}
# The kit compiles by layer, in whole graphs and for all lengths, whatever dynamo_use_... say.
_FREE = {
    "": """compute_environment debug downcast_bf16 enable_cpu_affinity machine_rank main_process_ip
main_training_function rdzv_backend same_network tpu_env tpu_use_cluster tpu_use_sudo""",
    "fsdp_config.fsdp_": "transformer_layer_cls_to_wrap state_dict_type sync_module_states backward_prefetch"
    " forward_prefetch",
    "dynamo_config.dynamo_use_": "dynamic fullgraph regional_compilation",
    f"parallelism_config.{PREFIX}": "cp_backend cp_comm_strategy sp_backend sp_seq_length sp_seq_length_is_variable"
    " sp_attn_implementation",
}
_KNOWN = {*_KEYS, *_NUMBERS, *_SECTIONS, *(prefix + name for prefix, names in _FREE.items() for name in names.split())}


@dataclass(frozen=True, kw_only=True)
class AccelerateConfig:
    """The settings of an Accelerate config, or of a launcher. Nothing here depends on the machine."""

    strategy: Strategy
    mixed_precision: Precision
    num_processes: int | None  # world size; None: one per GPU
    num_machines: int
    use_cpu: bool
    layer_classes: tuple[str, ...]  # classes to shard; empty: the model's own decoder layer
    reshard_after_forward: bool
    load_on_rank0: bool
    groups: GroupSizes = field(default_factory=GroupSizes)  # of HSDP (hybrid sharding)
    sequence_parallel_size: int = 1  # sequence-parallel group size (Ulysses)
    main_process_ip: str | None = None  # address of the master node
    main_process_port: int | None = None
    compiles: bool = False  # whether it has a ``dynamo_config``, which turns on torch.compile


def read_config(path: Path) -> AccelerateConfig:
    """Read and validate an Accelerate config file. Raises ``UserError`` with every problem of the file."""
    values, lines = read_yaml(path)
    if values and not _KNOWN & set(values):
        found = f"{path} has no key of an Accelerate config"
        raise UserError("--config", found, fix="a recipe, of any kit, is given by --recipe")
    return make_config(values, lambda key: f"{path}:{lines[key]} {key}" if key in lines else f"{path} {key}")


def make_config(values: Mapping[str, Any], where: Callable[[str], str]) -> AccelerateConfig:
    """Validate the values of a config.

    Args:
        values: by key; those of sections are mappings.
        where: returns the name of a key in a message: ``file:line key``.

    Raises:
        UserError: with all problems.
    """
    problems: list[Problem] = []
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key not in _SECTIONS:
            flat[str(key)] = value
        elif isinstance(value or {}, dict):
            flat |= {f"{key}.{name}": inner for name, inner in (value or {}).items()}
        else:
            problems.append(Problem(where(key), f"found {value!r}", f"a mapping of {key.removesuffix('config')} keys"))
    for key in [key for key in flat if key not in _KNOWN]:
        other_engine = key.split("_")[0] in ("deepspeed", "megatron", "tpu") and _OTHER_ENGINES
        hint = other_engine or did_you_mean(key, _KNOWN) or "remove it"
        problems.append(Problem(where(key), "not a key of an Accelerate config that this kit reads", fix=hint))

    def choice(key: str) -> str:
        value, allowed = flat.get(key), _KEYS[key].values
        text = (
            "no" if value is False and "no" in allowed else str(value).lower()
        )  # YAML reads an unquoted `NO` as false
        if value is None or text == "none":
            return allowed[0]
        if text not in allowed:
            expected = " or ".join(value.upper() if key == "distributed_type" else value for value in allowed)
            problems.append(Problem(where(key), f"found {value!r}", expected, _KEYS[key].fix))
        return text

    def number(key: str) -> int | None:
        value, least = flat.get(key), _NUMBERS[key]
        if value is None:
            return None
        if not re.fullmatch(r"-?\d+", str(value)) or int(value) < least or (key == "num_processes" and int(value) == 0):
            problems.append(Problem(where(key), f"found {value!r}", f"a whole number from {max(least, 1)}"))
            return None
        return int(value)

    chosen = {key: choice(key) for key in _KEYS}
    numbers = {key: number(key) for key in _NUMBERS}
    fsdp = {key.partition(".")[2]: value for key, value in chosen.items() if key.startswith("fsdp_config.")}
    kind = chosen["distributed_type"]
    name = _KINDS.get(kind, "single")
    if kind == "fsdp" and fsdp["fsdp_version"] == "1":
        name = "fsdp1"
    replicas, shards = (numbers[f"parallelism_config.{PREFIX}dp_{of}_size"] for of in ("replicate", "shard"))
    groups, fault = group_sizes(replicas, shards, name)
    if fault:
        problems.append(Problem(where("parallelism_config"), *fault))
    raise_if(problems)
    classes = flat.get("fsdp_config.fsdp_transformer_layer_cls_to_wrap") or ""
    names = classes if isinstance(classes, list) else str(classes).split(",")
    is_fsdp = kind == "fsdp"
    reshards = fsdp["fsdp_reshard_after_forward"] in ("true", "full_shard")
    if name == "fsdp1":
        reshards = reshards and fsdp["fsdp_sharding_strategy"] in ("full_shard", "1")
    offloads = fsdp["fsdp_offload_params"] == "true" and is_fsdp
    count, address = numbers["num_processes"], flat.get("main_process_ip")
    return AccelerateConfig(
        strategy=Strategy(name, offloads=offloads, replicates=groups != GroupSizes()),
        mixed_precision=cast(Precision, chosen["mixed_precision"]),
        num_processes=count if count and count > 0 else None,
        num_machines=numbers["num_machines"] or 1,
        use_cpu=chosen["use_cpu"] == "true",
        layer_classes=tuple(str(name).strip() for name in names if str(name).strip()),
        reshard_after_forward=reshards,
        load_on_rank0=fsdp["fsdp_cpu_ram_efficient_loading"] == "true" and is_fsdp,
        groups=groups,
        sequence_parallel_size=numbers[f"parallelism_config.{PREFIX}sp_size"] or 1,
        main_process_ip=str(address) if address else None,
        main_process_port=numbers["main_process_port"],
        compiles=chosen["dynamo_config.dynamo_backend"] == "inductor",
    )


def config_from_environment() -> AccelerateConfig:
    """Read the config from the environment variables that `accelerate launch` or torchrun sets.

    Raises:
        UserError: with all settings that the kit does not support.
    """
    env = os.environ

    def is_set(name: str) -> bool:
        return env.get(f"ACCELERATE_USE_{name}", "").lower() == "true"

    values: dict[str, Any] = {"distributed_type": "MULTI_GPU" if "RANK" in env else "NO"}
    for other in ("DEEPSPEED", "MEGATRON_LM"):
        if is_set(other):
            values["distributed_type"] = other
    if is_set("FSDP"):
        values["distributed_type"] = "FSDP"
        names = {"TRANSFORMER_CLS_TO_WRAP": "fsdp_transformer_layer_cls_to_wrap"}
        fsdp = {names.get(key[5:], key.lower()): value for key, value in env.items() if key.startswith("FSDP_")}
        # The launcher also passes on the defaults of keys that its config does not have.
        values["fsdp_config"] = {key: value for key, value in fsdp.items() if value and f"fsdp_config.{key}" in _KNOWN}
    if is_set("PARALLELISM_CONFIG"):
        # The launcher passes 1 on for each size that its config does not have.
        sizes = {key.lower(): value for key, value in env.items() if key.startswith(PREFIX.upper()) and value != "1"}
        values["parallelism_config"] = sizes
    for key in ("mixed_precision", "use_cpu"):
        values[key] = env.get(f"ACCELERATE_{key.upper()}")
    values["dynamo_config"] = {key: env.get(f"ACCELERATE_{key.upper()}") for key in ("dynamo_backend", "dynamo_mode")}
    return make_config(values, lambda key: f"the launcher's {key}")
