"""No process of a run on one machine listens beyond loopback: the stores and gloo have no password."""

import ipaddress
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from helpers import ROOT

SECONDS = 200  # a run starts, or ends after a signal, within them on a busy machine


@pytest.mark.slow
def test_a_run_on_one_machine_listens_on_loopback_only(tmp_path):
    # As on a machine from which runs on several machines are started too.
    other = next((name for name in psutil.net_if_addrs() if not name.startswith("lo")), "lo")
    env = os.environ | {"GLOO_SOCKET_IFNAME": other}
    words = ["--config", "ddp", "--num_processes", "2", "--output_dir", str(tmp_path / "run")]
    words += ["--max_steps", "5000", "--eval_steps", "0"]
    log = tmp_path / "log"
    with log.open("w") as file:
        command = [sys.executable, str(ROOT / "recipes/finetune.py"), *words]
        run = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=file, stderr=file)
    try:
        end = time.monotonic() + SECONDS
        while "step 1/" not in log.read_text():
            assert run.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        launcher = psutil.Process(run.pid)
        sockets = {
            (process.environ().get("RANK", "launcher"), each.laddr)
            for process in [launcher, *launcher.children(recursive=True)]
            for each in process.net_connections("inet")
            if each.status == psutil.CONN_LISTEN or not each.raddr
        }
        print(sockets)
        assert {who for who, _ in sockets} == {"launcher", "0", "1"}
        assert all(ipaddress.ip_address(address.ip).is_loopback for _, address in sockets)
        run.send_signal(signal.SIGTERM)
        assert run.wait(SECONDS) == 75, log.read_text()
    finally:
        run.kill()
        run.wait()
