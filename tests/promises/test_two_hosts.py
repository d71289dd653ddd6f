"""Two hosts cannot disagree in silence, and none waits for ever for the other."""

import json
import re
import shutil
import subprocess
import sys
import time

import pytest
from fake_cuda import compiler
from helpers import ROOT, matrix
from two_hosts import TwoHosts, why_not

pytestmark = pytest.mark.slow
long = pytest.mark.long
SCRIPT = str(ROOT / "recipes/finetune.py")
TIMEOUT = 20  # --ddp_timeout
START = 150  # seconds until both have imported everything, on a busy machine
CONFIG = """
distributed_type: MULTI_GPU
use_cpu: true
num_machines: 2
num_processes: 2
main_process_ip: 10.77.0.1
main_process_port: 29511
"""


@pytest.fixture(scope="session")
def reason():
    return why_not()


@pytest.fixture
def hosts(tmp_path, reason):
    if reason:
        pytest.skip(f"NOT TESTED: {reason}")
    hosts = TwoHosts(tmp_path)
    yield hosts
    hosts.close()


@pytest.fixture
def start(hosts, tmp_path):
    """Starts the same command on a host: ``start(host, script=SCRIPT, env={}, **flags)``."""
    config = tmp_path / "two.yaml"
    config.write_text(CONFIG)

    def start(host, script=SCRIPT, env=None, own_disk_at=None, **flags):
        values = {"config": config, "output_dir": tmp_path / "run", "max_steps": 4, "save_steps": 2}
        words = [f"--{name}={value}" for name, value in {**values, "ddp_timeout": TIMEOUT, **flags}.items()]
        return host.start([sys.executable, script, *words], own_disk_at, **(env or {}))

    return start


def wait(runs, seconds):
    """The status of each command once all processes of its host are gone; prints what each said, and when."""
    ended = [run.wait(seconds) for run in runs]
    for run, status in zip(runs, ended, strict=True):
        print(f"--- {run.host.name}: status {status}, {time.monotonic() - run.began:.1f} s after its start\n{run.text}")
        assert "Traceback" not in run.text
    return ended


def error_of(run):
    """The error message of a command, on one line; a host says it once."""
    assert run.text.count("error:") == 1, run.text
    return " ".join(run.text[run.text.index("error:") :].split())


def test_another_setting_version_or_code_on_one_host_is_refused_before_loading(hosts, start, tmp_path):
    clone = tmp_path / "clone"
    for folder in ("kit", "recipes"):
        shutil.copytree(ROOT / folder, clone / folder)
    with (clone / "kit/evaluate.py").open("a") as file:
        file.write("# changed\n")
    folder = tmp_path / "installed/torch-2.12.9.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.9\n")
    others = {"learning_rate": 1e-4, "warmup_steps": 3, "seed": 7, "per_device_train_batch_size": 8}
    own = {"script": str(clone / "recipes/finetune.py"), "env": {"PYTHONPATH": str(tmp_path / "installed")}}
    runs = [start(hosts.alpha), start(hosts.beta, **own, **others)]
    assert wait(runs, START) == [2, 2]
    for run in runs:
        told = error_of(run)
        assert re.search(r"seed: (42 on alpha \(rank \d\), 7 on beta|7 on beta \(rank \d\), 42 on alpha) \(rank", told)
        assert "6 problems" in told and all(f"- {name}: " in told for name in (*others, "torch", "code of kit/"))
        assert "2.12.9 on beta" in told
    assert not (tmp_path / "run").exists()


@long
def test_an_output_folder_that_is_not_shared_is_refused_at_the_start(hosts, start, tmp_path):
    (tmp_path / "own").mkdir()
    flags = {"output_dir": tmp_path / "own/run", "save_steps": 0}
    runs = [start(hosts.alpha, **flags), start(hosts.beta, own_disk_at=tmp_path / "own", **flags)]
    assert wait(runs, START) == [2, 2]
    for run in runs:
        assert re.search(
            r"output_dir: \S+ on \w+ is not that of rank 0; .* disk that all machines share", error_of(run)
        )
        assert "step 1/" not in run.text


@pytest.mark.parametrize(
    ("name", "address"),
    matrix([("alpha", "10.77.0.1"), ("alpha", "10.77.0.9")], always=0, rest=[("beta", "10.77.0.1")]),
)
def test_a_host_that_never_comes_and_a_wrong_address_are_reported_in_time(hosts, start, tmp_path, name, address):
    (tmp_path / "two.yaml").write_text(CONFIG.replace("10.77.0.1", address))
    run = start(getattr(hosts, name))
    run.wait_for(f"{name} waits ", 60)
    assert wait([run], TIMEOUT + 60) == [1]
    assert "--ddp_timeout" in error_of(run) and "start the same command on every machine" in run.text
    assert address in error_of(run)


@pytest.mark.release
def test_a_host_that_fails_early_ends_the_other_long_before_the_time_out(hosts, start, tmp_path):
    (tmp_path / "file").touch()
    runs = [start(hosts.alpha, ddp_timeout=1000), start(hosts.beta, env={"KIT_CACHE": str(tmp_path / "file")})]
    assert wait(runs, START) == [1, 2]
    assert "beta has ended this run, and says why" in error_of(runs[0])
    assert "cannot be written" in error_of(runs[1])


@pytest.fixture(scope="session")
def shifted_clock(tmp_path_factory):
    """Returns the environment of a host whose clock is so many seconds ahead."""
    found = compiler()
    assert found, "no C++ compiler: install g++ or clang++"
    library = tmp_path_factory.mktemp("clock") / "clock.so"
    subprocess.run([found, "-O1", "-fPIC", "-shared", ROOT / "tests/shifted_clock.cpp", "-o", library], check=True)
    return lambda seconds: {"LD_PRELOAD": str(library), "CLOCK_AHEAD": str(seconds)}


@pytest.mark.parametrize(("ahead", "seconds"), matrix([("alpha", 20)], always=0, rest=[("beta", 600)]))
def test_the_same_command_on_both_trains_also_with_clocks_that_differ(
    hosts, start, tmp_path, shifted_clock, ahead, seconds
):
    runs = [start(host, env=shifted_clock(seconds) if host.name == ahead else None) for host in hosts.both]
    assert wait(runs, START) == [0, 0]
    assert "alpha waits at 10.77.0.1:29511 for 1 more of 2 machines, at most 20 s (--ddp_timeout)" in runs[0].text
    assert "beta waits for 10.77.0.1:29511 (main_process_ip), at most 20 s" in runs[1].text
    assert json.loads((tmp_path / "run/run.json").read_text())["strategy"]["num_processes"] == 2
    assert (tmp_path / "run/final").is_dir()


def sockets(host, *words):
    """What `ss` says of TCP on a host, a line a socket."""
    command = ["ip", "netns", "exec", host.namespace, "ss", "-Htn", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


STRANGER = """
import base64, os, pickle, sys
from torch.distributed import TCPStore
class Command:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[1]}",)
store = TCPStore("10.77.0.1", 29511, is_master=False, wait_for_workers=False)
store.set("torch.rendezvous.none", base64.b64encode(pickle.dumps(Command())).decode())
"""


@pytest.mark.parametrize("fault", matrix(["cut"], always=0, rest=["alpha", "beta"]))
def test_nothing_of_a_stranger_is_executed_and_a_cut_link_ends_every_process(hosts, start, tmp_path, fault):
    """They listen in the network of the machines alone; each process of each host ends."""
    runs = [start(host, max_steps=5000, save_steps=0, eval_steps=0) for host in hosts.both]
    deadline = time.monotonic() + START
    while not any("step 1/" in run.text for run in runs):
        assert time.monotonic() < deadline and all(run.process.poll() is None for run in runs), runs[0].text
        time.sleep(0.1)
    for host in hosts.both:
        assert {line.split()[3].rpartition(":")[0] for line in sockets(host, "-l")} == {host.address}
    stranger = hosts.beta.start([sys.executable, "-c", STRANGER, str(tmp_path / "executed")])
    assert stranger.process.wait(START) == 0
    time.sleep(5)
    assert all(run.process.poll() is None for run in runs) and not (tmp_path / "executed").exists()

    hosts.cut()
    for run in [run for run in runs if run.host.name == fault]:
        run.host.kill()
        runs.remove(run)
    for run in runs:
        status = run.wait(2 * TIMEOUT + 30)
        print(f"--- {run.host.name}: status {status}\n{run.text}")
        assert status != 0
        assert re.search(r"rank \d on \w+ .*last seen|did not arrive|does not answer|are gone|is gone", run.text)
