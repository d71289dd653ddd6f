"""All checks of one machine, in the order in which they are printed: what imports little comes first.

Promises: checks that are left out, because the model could not be opened, are reported as such.
"""

import shlex
import sys

from kit.errors import Problem
from kit.strategy.launch import LaunchPlan
from kit.strategy.launcher import LaunchedRank
from kit.strategy.strategies import SINGLE
from kit.tools.doctor.host import check_disk, check_file_descriptors, check_memory, check_names, check_port
from kit.tools.doctor.result import Report, Result, of_problems, ok


def check_machine(report: Report, planned: LaunchPlan, launched: LaunchedRank | None) -> None:
    """Make all checks that need no other rank.

    Args:
        launched: this process as a launcher started it; None without one.
    """
    recipe, topology, config = planned.recipe, planned.topology, planned.config
    config_file = str(planned.config_file) if planned.config_file else None
    several_machines = launched.several_machines if launched else config.num_machines > 1
    local_world = launched.local_world if launched else -(-topology.num_processes // config.num_machines)
    report.run("launch", lambda: _check_launch(planned, launched))
    if planned.batch_problems:
        report.add(of_problems("batch", planned.batch_problems, ""))
    report.run("file descriptors", lambda: check_file_descriptors(topology.num_processes))
    report.run("host name", lambda: check_names(several_machines, config.main_process_ip))
    if launched is None and topology.strategy != SINGLE:  # else the port is open by now
        needed = several_machines or config.main_process_port is not None
        report.run("port", lambda: check_port(config.main_process_port, needed))

    from kit.tools.doctor import devices

    report.run("driver", lambda: devices.check_driver(topology))
    report.run("bf16", lambda: devices.check_bf16(topology, config_file, recipe.method))
    if recipe.fp8:
        report.run("fp8", lambda: devices.check_fp8(recipe, topology))
    report.run("4-bit product", lambda: devices.check_four_bit(recipe.method, recipe.optim, topology.device_type))

    from kit.memory.fit import memory_problems, planned_workload, resolve_auto
    from kit.memory.needs import needs_of_run
    from kit.tools.doctor import inputs  # transformers takes seconds

    opened = inputs.OpenedModel()
    report.run("model", lambda: inputs.check_model_opens(recipe, opened))
    report.run("data", lambda: inputs.check_data(recipe, opened))
    if opened.meta_model is not None:
        report.run("wrap class", lambda: inputs.check_wrap_class(topology, opened.meta_model))
    needs = None
    refused: list[Problem] = []
    if opened.adapted is not None:
        needs = needs_of_run(recipe, topology, opened.adapted, local_world, opened.config.dtype)
        resolved = resolve_auto(recipe, topology, opened.config)
        refused = memory_problems(planned_workload(resolved, topology, opened.config), topology)
    report.run("GPUs", lambda: devices.check_gpus(topology, needs, local_world, refused))
    report.run("attention", lambda: devices.check_attention(recipe, recipe.packing, opened.config, topology))
    if needs is None:
        fix = "correct the model first"
        report.add(Result("memory and disk", "warn", "not checked: the model could not be opened", fix))
        return
    report.run("memory", lambda: check_memory(needs, local_world))
    report.run("disk", lambda: check_disk(recipe.output_dir, needs))


def _check_launch(planned: LaunchPlan, launched: LaunchedRank | None) -> Result:
    topology, config = planned.topology, planned.config
    count = f"{topology.num_processes} process{'es' if topology.num_processes > 1 else ''}"
    if launched is None and config.num_machines > 1:
        # What needs one machine only is checked. The doctor starts no ranks on several machines; a launcher does.
        words = shlex.join(sys.argv[1:])
        file = shlex.quote(str(planned.config_file))
        fix = f"on machine N (0, 1, ...): accelerate launch --config_file {file} --machine_rank N"
        fix += f" -m kit.cli.main {words}"
        # A wrong address is reported with the host name.
        problems = [p for p in planned.problems if p.where != "main_process_ip" or not config.main_process_ip]
        if problems:
            return of_problems("launch", problems, "")
        found = f"{count} on {config.num_machines} machines; without a launcher only this one is checked"
        return Result("launch", "warn", found, fix)
    if planned.problems:
        return of_problems("launch", planned.problems, "")
    return ok("launch", f"{topology.strategy.title}, {count}, config {topology.config_name}")
