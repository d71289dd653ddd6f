"""Train on a Ray cluster: one Ray worker per machine starts the kit's own command there.

    ray job submit --address http://head:8265 --working-dir . -- python launchers/ray_train.py

Edit the three places marked EDIT. If a worker fails or loses its machine, Ray starts all of them again, and the run
continues from its last checkpoint: so set --save_steps.

Tested: with Ray 2.60.0 on two hosts made of network namespaces, a rank on each, to the end of a run of six steps.
Not tested: a cluster, and what Ray does when a worker fails.
"""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

# EDIT 1: the machines.
NUM_MACHINES = 2
GPUS_PER_MACHINE = 8  # 0: a dry run on the CPU
MAX_FAILURES = 10

# EDIT 2: the clone of the kit, at the same path on every machine.
CLONE = Path("/shared/kit")

# EDIT 3: the run. The output folder is on a disk that all machines share.
CONFIG = CLONE / "accelerate_configs/fsdp.yaml"
OUTPUT_DIR = Path("/shared/runs/ray")
FLAGS = [
    "--recipe",
    "qwen3-32b-full",
    "--per_device_train_batch_size",
    "1",
    "--dataset",
    "/shared/my.jsonl",
    "--save_steps",
    "200",
]


def run() -> None:
    """Start the kit on this machine, and wait for its end. Raises ``RuntimeError`` if it fails, so that Ray retries."""
    # Ray has set the address of the first worker for torch. The port is in use there, by the group of Ray's workers.
    port = 20000 + int(os.environ["MASTER_PORT"]) % 10000
    machines = {"num_machines": NUM_MACHINES, "main_process_ip": os.environ["MASTER_ADDR"], "main_process_port": port}
    config = Path(tempfile.mkdtemp()) / "ray.yaml"
    config.write_text(CONFIG.read_text() + "".join(f"{name}: {value}\n" for name, value in machines.items()))
    command = [sys.executable, "recipes/finetune.py", "--config", str(config), "--output_dir", str(OUTPUT_DIR), *FLAGS]
    # Without the ranks of Ray's workers: the kit has ranks of its own, one for each GPU.
    env = {name: value for name, value in os.environ.items() if name not in _OF_A_WORKER}
    if status := subprocess.run(command, cwd=CLONE, env=env).returncode:
        raise RuntimeError(f"the run ended with status {status} on {socket.gethostname()}; see its output above")


_OF_A_WORKER = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT".split()

if __name__ == "__main__":
    TorchTrainer(
        run,
        torch_config=TorchConfig(backend="gloo"),  # Ray's own group, which nothing uses, takes no memory of a GPU
        scaling_config=ScalingConfig(
            num_workers=NUM_MACHINES,
            use_gpu=GPUS_PER_MACHINE > 0,
            resources_per_worker={"GPU": GPUS_PER_MACHINE} if GPUS_PER_MACHINE else {"CPU": 1},
            placement_strategy="STRICT_SPREAD",
        ),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=MAX_FAILURES)),
    ).fit()
