"""docs/multi-node.md works to the letter: its commands, typed on two hosts, train."""

import re
import time

import pytest
from helpers import ROOT
from two_hosts import TwoHosts, why_not

PAGE = (ROOT / "docs/multi-node.md").read_text()
SECONDS = 240  # until a run of twenty steps has ended, on a busy machine
# The page has machines with eight GPUs; here a host has one rank.
HERE = {"10.0.0.1": "10.77.0.1", "--num_processes 16": "--num_processes 2", "--nproc_per_node 8": "--nproc_per_node 1"}


def blocks(title):
    """The bash blocks under the heading that ends with ``title``, each as one text."""
    section = re.search(rf"^## \d\. {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]
    return re.findall(r"```bash\n(.*?)```", section, re.DOTALL)


STARTS = [block.strip() for block in blocks("Start") if "qwen3-32b" not in block]


def test_the_page_has_a_command_for_each_launcher():
    assert [start.split()[0] for start in STARTS] == ["python", "accelerate", "torchrun"]


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.split()[0])
def test_the_commands_of_the_page_train_on_two_hosts(tmp_path, start):
    if reason := why_not():
        pytest.skip(f"NOT TESTED: {reason}")
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("kit", "recipes", "accelerate_configs"):
        (clone / name).symlink_to(ROOT / name)
    hosts = TwoHosts(tmp_path)
    try:
        runs = []
        for rank, host in enumerate(hosts.both):
            names, _ = blocks("Names and interfaces")
            script = f"mkdir -p {clone.name}-{rank} && cp -a {clone}/. {clone.name}-{rank} && cd {clone.name}-{rank}\n"
            script += names + blocks("The config")[0] + start.replace("--machine_rank 0", f"--machine_rank {rank}")
            for old, new in {**HERE, "/shared/": f"{tmp_path}/shared/"}.items():
                script = script.replace(old, new)
            runs.append(host.start(["bash", "-ec", f"cd {tmp_path}\n{script}"]))
        ended = [run.wait(SECONDS) for run in runs]
        print(f"{start.split()[0]}: {time.monotonic() - runs[0].began:.0f} s")
        for run, (status, _) in zip(runs, ended, strict=True):
            print(f"--- {run.host.name}: status {status}\n{run.text}")
            assert status == 0 and f"{run.host.address} " in run.text and "eth7" in run.text
        assert len(list((tmp_path / "shared/runs").glob("*/final"))) == 1
    finally:
        hosts.close()
