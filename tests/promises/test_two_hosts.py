"""Two hosts cannot differ silently, and none waits for ever for the other."""

import re
import shutil
import subprocess
import sys
import time

import pytest
from helpers import ROOT, matrix
from two_hosts import TwoHosts, why_not

pytestmark = pytest.mark.slow
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

    def start(host, script=SCRIPT, env=None, **flags):
        values = {"config": config, "output_dir": tmp_path / "run", "max_steps": 4, "save_steps": 2}
        words = [f"--{name}={value}" for name, value in {**values, "ddp_timeout": TIMEOUT, **flags}.items()]
        return host.start([sys.executable, script, *words], **(env or {}))

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


@pytest.mark.parametrize(
    ("name", "address"),
    matrix([("alpha", "10.77.0.1"), ("alpha", "10.77.0.9")], always=0, rest=[("beta", "10.77.0.1")]),
)
def test_a_host_that_never_comes_and_a_wrong_address_are_reported_in_time(hosts, start, tmp_path, name, address):
    (tmp_path / "two.yaml").write_text(CONFIG.replace("10.77.0.1", address))
    run = start(getattr(hosts, name))
    assert wait([run], TIMEOUT + 60) == [1] and f"{name} waits " in run.text
    assert "--ddp_timeout" in error_of(run) and "start the same command on every machine" in run.text
    assert address in error_of(run)


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
def test_no_untrusted_input_is_executed_and_a_cut_link_ends_every_process(hosts, start, tmp_path, fault):
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
        assert re.search(r"rank \d on \w+ .*last seen|never reached|does not answer|exited", run.text)
