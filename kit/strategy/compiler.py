"""Whether a run compiles its layers, and whether it can. Imports no torch."""

from importlib.util import find_spec

from kit.config.settings.process import ProcessSettings
from kit.strategy.topology import Topology
from kit.system.errors import Problem


def resolve_compile(settings: ProcessSettings, config_asks: bool, topology: Topology) -> tuple[bool, list[str]]:
    """Return whether layers are compiled, and a line that says why ``auto`` does not compile.

    ``auto`` compiles on CUDA if the run can. On a CPU, compiling takes longer than it saves in a dry run.

    Args:
        config_asks: whether the Accelerate config has a ``dynamo_config``. It counts unless the recipe or a flag says
            otherwise.
    """
    if config_asks and "torch_compile" not in settings.model_fields_set:
        return True, []
    if settings.torch_compile != "auto":
        return settings.torch_compile, []
    if topology.device_type != "cuda":
        return False, [f"torch_compile auto: nothing is compiled on {topology.device_type}"]
    problems = compile_problems(topology)
    return not problems, [f"torch_compile auto: nothing is compiled: {problem.found}" for problem in problems]


def compile_problems(topology: Topology) -> list[Problem]:
    """Return a problem if the strategy, or the device, cannot compile. Other problems torch reports itself."""
    if topology.strategy.name == "fsdp1":
        found, fix = "not supported with FSDP1, which wraps the adapters inside layers", "--config fsdp"
    elif topology.device_type == "mps":
        found, fix = "not tested on MPS", "use a CUDA GPU"
    elif topology.device_type == "cuda" and find_spec("triton") is None:
        found, fix = "needs triton, which is not installed", "pip install triton"
    else:
        return []
    return [Problem("torch_compile", found, fix=f"{fix}; or --torch_compile false")]
