"""Facts that must be equal on every machine of a run: recipe, topology, data, base model, versions, source.

Promises: a difference that changes the results, or that would make ranks wait for ever, refuses the run. Ignored: paths
whose content is equal, the number of processes that tokenise, other packages, and the environment.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from kit.config.paths import PACKAGE, REINSTALL
from kit.run.record import versions
from kit.strategy.processes.agreement import Fact
from kit.strategy.topology import Topology

# Their content is compared: ``content`` of ``compared_facts`` has it, and kit/run/shared.py looks at output_dir.
_PATHS = """
model_name_or_path adapter_name_or_path teacher dataset eval_dataset chat_template output_dir resume_from_checkpoint
"""
OWN_OF_MACHINE = {*_PATHS.split(), "dataset_num_proc"}
# With another version of one of these, ranks may disagree on the collectives. The kit's own is in it.
_COMPARED_VERSIONS = ("kit", "torch", "transformers", "peft", "accelerate")

_SAME_COMMAND = "the same command and recipe file on every machine: make it once, and copy it"
_SAME_CLONE = f"the same kit and environment on every machine: {REINSTALL}"


def compared_facts(settings: Mapping[str, Any], topology: Topology, content: Mapping[str, Any]) -> list[Fact]:
    """Return the facts that ranks compare before they load weights.

    Args:
        settings: of the recipe, in JSON, without those of ``OWN_OF_MACHINE``.
        content: fingerprints of the content of the recipe's paths, by the field that a message names.
    """
    script = Path(sys.argv[0])
    planned = {key: value for key, value in asdict(topology).items() if key != "config_name"}
    planned |= {"strategy": topology.strategy.name, "offload": topology.strategy.offloads}
    # First the facts that explain other differences.
    known = versions()
    found = [Fact(name, known[name], _SAME_CLONE) for name in _COMPARED_VERSIONS]
    found += [Fact("code of kit/", code_digest(PACKAGE), _SAME_CLONE)]
    if script.suffix == ".py" and script.is_file():
        found += [Fact(f"code of {script.name}", xxhash.xxh3_64_hexdigest(script.read_bytes()), _SAME_CLONE)]
    found += [Fact(key, value, "the same --config on every machine") for key, value in planned.items()]
    found += [Fact(key, value, _SAME_COMMAND) for key, value in settings.items()]
    fix = "the same files on every machine: copy them, or use a disk that all machines share"
    return found + [Fact(key, value, fix) for key, value in content.items()]


def code_digest(folder: Path) -> str:
    """Return a digest of all Python files below ``folder``, by their names and content."""
    state = xxhash.xxh3_64()
    for path in sorted(folder.rglob("*.py")):
        state.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return state.hexdigest()
