"""What must be the same on every machine of a run: recipe, topology, data, base model, versions, source, environment.

Promises: a difference that changes what is learned, or that would make ranks wait for ever, refuses the run. Others
are warnings. What may differ without a word: the text of a path whose content is equal, the number of processes that
tokenise, and which network interface a machine has.
"""

import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from kit.config.recipe import PACKAGE, REINSTALL, Recipe
from kit.run.record import versions
from kit.strategy.agreement import Fact
from kit.strategy.topology import Topology

# Their content is compared: ``content`` of ``compared_facts`` has it, and kit/run/shared.py looks at output_dir.
_PATHS = "model_name_or_path adapter_name_or_path dataset eval_dataset chat_template output_dir resume_from_checkpoint"
_OWN_OF_MACHINE = (*_PATHS.split(), "dataset_num_proc")
# With another version of one of these, ranks may disagree on the collectives. The kit's own is in it.
_REFUSED_VERSIONS = ("kit", "torch", "transformers", "peft", "accelerate")
_ENVIRONMENT = ("NCCL_", "TORCH_NCCL_", "CUBLAS_", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "NVIDIA_TF32_")
_INTERFACES = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")

_SAME_COMMAND = "the same command and recipe file on every machine: make it once, and copy it"
_SAME_CLONE = f"the same kit and environment on every machine: {REINSTALL}"


def compared_facts(recipe: Recipe, topology: Topology, content: dict[str, Any]) -> list[Fact]:
    """Return what ranks compare before they load weights.

    Args:
        content: fingerprints of what the paths of the recipe hold, by the field that a message names.
    """
    code = code_digest(PACKAGE)
    script = Path(sys.argv[0])
    settings = recipe.model_dump(mode="json", exclude=set(_OWN_OF_MACHINE))
    settings["learning_rate"] = recipe.peak_learning_rate
    planned = {key: value for key, value in asdict(topology).items() if key != "config_name"}
    planned |= {"strategy": topology.strategy.name, "offload": topology.strategy.offloads}
    # What explains other differences comes first.
    found = [Fact(name, value, _SAME_CLONE, name in _REFUSED_VERSIONS) for name, value in machine_versions().items()]
    found += [Fact("code of kit/", code, _SAME_CLONE)]
    if script.suffix == ".py" and script.is_file():
        found += [Fact(f"code of {script.name}", xxhash.xxh3_64_hexdigest(script.read_bytes()), _SAME_CLONE)]
    found += [Fact(key, value, "the same --config on every machine") for key, value in planned.items()]
    found += [Fact(key, value, _SAME_COMMAND) for key, value in settings.items()]
    fix = "the same files on every machine: copy them, or use a disk that all machines share"
    found += [Fact(key, value, fix) for key, value in content.items()]
    found += [Fact("device", _device(topology), "all ranks wait for the slowest", refuses=False)]
    values = {key: os.environ[key] for key in sorted(os.environ) if key.startswith(_ENVIRONMENT)}
    found += [
        Fact(key, value, "the same environment on every machine", refuses=False)
        for key, value in values.items()
        if key not in _INTERFACES
    ]
    return found


def machine_versions() -> dict[str, str | None]:
    """Return the versions of Python, the kit and the libraries that affect results."""
    return {"Python": platform.python_version(), **versions()}


def code_digest(folder: Path) -> str:
    """Return a digest of all Python files below ``folder``, by their names and content."""
    state = xxhash.xxh3_64()
    for path in sorted(folder.rglob("*.py")):
        state.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return state.hexdigest()


def _device(topology: Topology) -> str:
    import torch

    return torch.cuda.get_device_name() if topology.device_type == "cuda" else topology.device_type
