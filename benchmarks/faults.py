"""Random faults on hosts made of network namespaces: every run ends with a reason, and the same command finishes it.

sudo python benchmarks/faults.py --seeds 0-33 --hosts 2
sudo python benchmarks/faults.py --seeds 34-49 --hosts 4
python benchmarks/faults.py --summary

For each seed a run of the tiny model is disturbed once: the seed chooses the fault, the moment and the victim. When all
processes are gone, the fault is removed and the same command is typed again until the run is finished. Then every loss
and every final weight is compared with an undisturbed run on as many hosts: `equal` means in each bit; on fewer hosts,
to rounding. `named` means that each host ended with an error that says why, or with status 75 after a signal.

Each seed appends a line of JSON to --results; seeds that are there are not run again.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from two_hosts import Host, Hosts, Started, why_not  # noqa: E402

GRACE = 30  # seconds beside --ddp_timeout in which every process must be gone
PATIENCE = 180  # seconds after which what is left is killed, to go on with the next seed
STEPS = 16
FLAGS = {
    "max_steps": STEPS,
    "save_steps": 4,
    "eval_steps": 0,
    "eval_on_start": "false",
    "predict_with_generate": "false",
    "global_batch_size": 12,
    "per_device_train_batch_size": 3,  # so one, two and four hosts can share a batch
    "max_eval_samples": 4,
    "max_length": 64,
    "logging_steps": 1,
    "deterministic": "true",
}
CONFIG = """
distributed_type: MULTI_GPU
use_cpu: true
num_machines: {count}
num_processes: {count}
main_process_ip: {address}
main_process_port: 29511
"""


@dataclass
class Trial:
    """A run on hosts, its fault, and what comes of it."""

    seed: int
    hosts: Hosts
    folder: Path
    rng: random.Random
    timeout: int  # --ddp_timeout
    using: list[Host] = field(default_factory=list)  # the hosts on which the command is typed
    runs: list[Started] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)  # names of hosts, or of their launchers, that were killed
    repair: list[Callable[[], None]] = field(default_factory=list)  # before the command is typed again
    fewer: bool = False  # whether fewer hosts continue

    def start(self, wrong: dict[str, dict[str, str]] | None = None) -> None:
        """Type the command on each host; ``wrong``: other flags or variables (in capitals) of a host."""
        config = self.folder / "hosts.yaml"
        config.write_text(CONFIG.format(count=len(self.using), address=self.using[0].address))
        self.runs = []
        for host in self.using:
            changes = (wrong or {}).get(host.name, {})
            flags = {"config": str(config), "output_dir": str(self.output), "ddp_timeout": str(self.timeout), **FLAGS}
            flags |= {key: value for key, value in changes.items() if key.islower()}
            env = environment(self.hosts, host) | {key: value for key, value in changes.items() if key.isupper()}
            words = [f"--{key}={value}" for key, value in flags.items()]
            self.runs.append(host.start([sys.executable, str(ROOT / "recipes/finetune.py"), *words], **env))

    @property
    def output(self) -> Path:
        return self.folder / "runs" / f"seed-{self.seed}"

    def step(self) -> int:
        """The last step that is in the log."""
        rows = losses(self.output)
        return max(rows, default=0)

    def wait_for_step(self, step: int) -> None:
        end = time.monotonic() + PATIENCE
        while self.step() < step and time.monotonic() < end and self.processes():
            time.sleep(0.1)

    def processes(self) -> list[psutil.Process]:
        return [process for host in self.hosts.all for process in host.processes()]

    def wait_until_gone(self) -> tuple[float, int]:
        """Seconds until every process is gone, and how many had to be killed then."""
        began = time.monotonic()
        while left := self.processes():
            if time.monotonic() > began + PATIENCE:
                for host in self.hosts.all:
                    host.kill()
                return time.monotonic() - began, len(left)
            time.sleep(0.2)
        return time.monotonic() - began, 0

    def statuses(self) -> dict[str, int]:
        """The exit status of each command, when all have ended."""
        return {run.host.name: run.process.wait(10) for run in self.runs}

    def victim(self) -> Started:
        return self.rng.choice(self.runs)

    def ranks_of(self, run: Started) -> list[psutil.Process]:
        """The processes that a launcher started."""
        with suppress(psutil.Error):
            return psutil.Process(run.process.pid).children()
        return []


Fault = Callable[[Trial], str]
FAULTS: dict[str, Fault] = {}


def fault(make: Fault) -> Fault:
    """Register a fault: it disturbs a run, and returns what it did."""
    FAULTS[make.__name__.replace("_", " ")] = make
    return make


def send(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


@fault
def killed_rank(trial: Trial) -> str:
    run = trial.victim()
    send(trial.ranks_of(run), signal.SIGKILL)
    return f"rank of {run.host.name}"


@fault
def killed_launcher(trial: Trial) -> str:
    run = trial.victim()
    trial.dead.add(run.host.name)
    run.process.kill()
    return run.host.name


@fault
def lost_host(trial: Trial) -> str:
    host = trial.victim().host
    trial.dead.add(host.name)
    trial.hosts.cut(host)
    host.kill()
    trial.repair.append(lambda: trial.hosts.restore(host))
    return host.name


@fault
def cut_cable(trial: Trial) -> str:
    host = trial.victim().host
    trial.hosts.cut(host)
    trial.repair.append(lambda: trial.hosts.restore(host))
    return host.name


@fault
def cable_cut_for_a_while(trial: Trial) -> str:
    host, seconds = trial.victim().host, trial.rng.uniform(1, 12)
    trial.hosts.cut(host)
    time.sleep(seconds)
    trial.hosts.restore(host)
    return f"{host.name} for {seconds:.0f} s"


@fault
def stopped_rank(trial: Trial) -> str:
    run, seconds = trial.victim(), trial.rng.uniform(2, 45)
    ranks = trial.ranks_of(run)
    send(ranks, signal.SIGSTOP)
    time.sleep(seconds)
    send(ranks, signal.SIGCONT)
    return f"rank of {run.host.name} for {seconds:.0f} s"


@fault
def stopped_host(trial: Trial) -> str:
    host, seconds = trial.victim().host, trial.rng.uniform(2, 45)
    processes = host.processes()
    send(processes, signal.SIGSTOP)
    time.sleep(seconds)
    send(processes, signal.SIGCONT)
    return f"{host.name} for {seconds:.0f} s"


@fault
def signal_to_a_rank(trial: Trial) -> str:
    run, number = trial.victim(), trial.rng.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
    send(trial.ranks_of(run), number)
    return f"{number.name}, rank of {run.host.name}"


@fault
def signal_to_a_launcher(trial: Trial) -> str:
    run, number = trial.victim(), trial.rng.choice([signal.SIGTERM, signal.SIGINT])
    with suppress(ProcessLookupError):
        os.kill(run.process.pid, number)
    return f"{number.name}, {run.host.name}"


@fault
def full_disk(trial: Trial) -> str:
    filler = trial.folder / "runs/filler"
    trial.repair.append(lambda: filler.unlink(missing_ok=True))
    free = shutil.disk_usage(filler.parent).free
    left = trial.rng.choice([0, 4096, 1 << 20, 4 << 20])
    with suppress(OSError), filler.open("wb") as file:
        file.write(bytes(max(0, free - left)))
    return f"{left} bytes left"


@fault
def damaged_checkpoint(trial: Trial) -> str:
    for host in trial.using:
        trial.dead.add(host.name)
        host.kill()
    files = sorted(trial.output.glob("checkpoints/step-*/*"))
    newest = [path for path in files if path.parent == files[-1].parent]
    if not newest:
        return "none yet"
    path, how = trial.rng.choice(newest), trial.rng.choice(["flipped", "cut", "removed"])
    data = bytearray(path.read_bytes())
    where = trial.rng.randrange(len(data))
    data[where] ^= 1 << trial.rng.randrange(8)
    if how == "removed":
        path.unlink()
    else:
        path.write_bytes(data if how == "flipped" else data[:where])
    return f"{path.parent.name}/{path.name} {how}"


@fault
def replaced_host(trial: Trial) -> str:
    old = trial.victim().host
    trial.dead.add(old.name)
    old.kill()

    def replace() -> None:
        trial.hosts.rename(old, f"new{trial.seed}", f"10.77.0.{100 + trial.seed}")

    trial.repair.append(replace)
    return old.name


@fault
def fewer_hosts(trial: Trial) -> str:
    lost = trial.rng.sample(trial.using, len(trial.using) - trial.rng.choice([1, len(trial.using) // 2]))
    for host in lost:
        trial.dead.add(host.name)
        host.kill()
    trial.using = [host for host in trial.using if host not in lost]
    trial.fewer = True
    return f"without {', '.join(host.name for host in lost)}"


def wrong_flag(trial: Trial) -> dict[str, dict[str, str]]:
    return {trial.rng.choice(trial.using).name: {"learning_rat": "1"}}


def full_cache(trial: Trial) -> dict[str, dict[str, str]]:
    (trial.folder / "file").touch()
    return {trial.rng.choice(trial.using).name: {"KIT_CACHE": str(trial.folder / "file")}}


AT_START = {"wrong flag": wrong_flag, "cache that cannot be written": full_cache}


def environment(hosts: Hosts, host: Host) -> dict[str, str]:
    """The variables of a host; its cache is its own."""
    return {"KIT_CACHE": str(host.folder / f"cache-{hosts.all.index(host)}"), "HF_HUB_OFFLINE": "1"}


def losses(output: Path) -> dict[int, tuple[str, str]]:
    """The loss and the norm of the gradient of each step, with every bit."""
    rows = {}
    with suppress(OSError):
        for line in (output / "metrics.jsonl").read_text().splitlines():
            with suppress(ValueError):
                row = json.loads(line)
                if "loss" in row and "step" in row:
                    rows[int(row["step"])] = (float(row["loss"]).hex(), float(row["grad_norm"]).hex())
    return rows


def compare(output: Path, reference: Path, to_rounding: bool) -> str:
    """``equal``, or what differs."""
    from safetensors.numpy import load_file

    own, other = losses(output), losses(reference)
    weights, others = (load_file(folder / "final/model.safetensors") for folder in (output, reference))
    if not to_rounding:
        if own != other:
            steps = [step for step in other if own.get(step) != other[step]]
            return f"losses differ from step {steps[0]} on" if steps else "more steps"
        same = weights.keys() == others.keys() and all((weights[name] == others[name]).all() for name in others)
        return "equal" if same else "weights differ"
    far = max(abs(float.fromhex(own[step][0]) - float.fromhex(other[step][0])) for step in other)
    apart = max(float(abs(weights[name] - others[name]).max()) for name in others)
    return f"equal (losses to {far:.0e}, weights to {apart:.0e})" if far < 1e-4 else f"losses differ by {far:.1e}"


def text_of(run: Started) -> str:
    """What a host printed, without the lines of torch's C++ about sockets."""
    noise = re.compile(r"\[[WE]\d|frame #|<omitting python frames>|Exception raised from|step |Failed to load CPU")
    return "\n".join(line for line in run.text.splitlines() if not noise.match(line))


def reason(run: Started) -> str:
    """The error of a host on one line; of a stop by signal the line that says so."""
    found = re.search(r"\nerror: |stopped by a signal|failed:\nTraceback", text := text_of(run))
    return " ".join(text[found.start() :].split())[:500] if found else ""


def is_named(run: Started, status: int | None) -> bool:
    if status is not None and status <= 0:  # below 0: killed by the signal that this script sent
        return True
    return status == 75 or (bool(reason(run)) and "Traceback" not in run.text)


def one(hosts: Hosts, folder: Path, seed: int, timeout: int) -> dict[str, Any]:
    """Disturb a run as ``seed`` says, finish it, and return what came of it."""
    trial = Trial(seed, hosts, folder, random.Random(seed), timeout, list(hosts.all))
    names = [*FAULTS, *AT_START]
    what = names[seed % len(names)]
    moment: str
    begun = time.monotonic()
    if what in AT_START:
        trial.start(AT_START[what](trial))
        moment, victim = "before the start", ""
    else:
        trial.start()
        if trial.rng.random() < 0.25:
            seconds = trial.rng.uniform(0, 8)
            time.sleep(seconds)
            moment = f"{seconds:.1f} s after the start"
        else:
            trial.wait_for_step(trial.rng.randrange(1, STEPS))
            time.sleep(trial.rng.uniform(0, 0.5))
            moment = f"step {trial.step()}"
        victim = FAULTS[what](trial)
    seconds, left = trial.wait_until_gone()
    status = trial.statuses()
    judged = [run for run in trial.runs if run.host.name not in trial.dead]
    named = all(is_named(run, status[run.host.name]) for run in judged)
    found: dict[str, Any] = {
        "seed": seed, "hosts": len(hosts.all), "fault": what, "victim": victim, "moment": moment,
        "seconds": round(seconds, 1), "left": left, "status": status, "named": named,
        "reasons": {run.host.name: reason(run) for run in judged},
    }  # fmt: skip
    if not named or left:
        found["logs"] = {run.host.name: text_of(run)[-3000:] for run in trial.runs}
    for repair in trial.repair:
        repair()
    for attempt in range(1, 4):
        if attempt == 1 and not any(status.values()) and (trial.output / "final").is_dir():
            found["typed again"] = 0  # the fault did no harm
            break
        trial.start()
        _, stuck = trial.wait_until_gone()
        again = list(trial.statuses().values())
        found["typed again"], found["status again"] = attempt, again
        if not any(again) and not stuck:
            break
        found.setdefault("again", []).append({run.host.name: text_of(run)[-1500:] for run in trial.runs})
    reference = folder / f"reference-{len(hosts.all)}"
    with suppress(OSError, ValueError, KeyError):
        found["continued"] = compare(trial.output, reference, trial.fewer)
    found["took"] = round(time.monotonic() - begun, 1)
    ends_well = str(found.get("continued", "")).startswith("equal")
    found["failed"] = not (named and not left and seconds <= timeout + GRACE and ends_well)
    shutil.rmtree(trial.output, ignore_errors=True)
    return found


def line_of(found: dict[str, Any]) -> str:
    statuses = ", ".join(f"{name} {status}" for name, status in found["status"].items())
    told = next(iter(found["reasons"].values()), "")
    told = next((text for text in found["reasons"].values() if text), told)
    return (
        f"{'FAILED ' if found['failed'] else ''}seed {found['seed']}, {found['hosts']} hosts: {found['fault']} "
        f"({found['victim']}) at {found['moment']}; gone after {found['seconds']} s; {statuses}; "
        f"{'named' if found['named'] else 'NOT NAMED'}; continued: {found.get('continued')}\n    {told[:200]}"
    )


def summary(results: Path) -> None:
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    slowest = max(rows, key=lambda row: row["seconds"])
    named, stayed, failed = (sum(map(bool, [row[key] for row in rows])) for key in ("named", "left", "failed"))
    equal = sum(str(row.get("continued", "")).startswith("equal") for row in rows)
    print(f"{len(rows)} faults: {named} named on each host, {equal} continued and equal, {failed} failed;")
    print(f"{stayed} times processes stayed")
    print(f"longest wait: {slowest['seconds']} s (seed {slowest['seed']}, {slowest['fault']})")
    for row in rows:
        if row["failed"]:
            print(line_of(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-49", help="first and last")
    parser.add_argument("--hosts", type=int, default=2, help="how many hosts, 2 to 4")
    parser.add_argument("--timeout", type=int, default=20, help="--ddp_timeout; more on a busy machine")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/kit-faults"), help="for runs and caches")
    parser.add_argument("--results", type=Path, default=None, help="default: results.jsonl in the folder")
    parser.add_argument("--summary", action="store_true", help="only sum up the results")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    results = arguments.results or folder / "results.jsonl"
    if arguments.summary:
        summary(results)
        return
    if missing := why_not():
        sys.exit(missing)
    first, _, last = arguments.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    done = {json.loads(line)["seed"] for line in results.read_text().splitlines()} if results.exists() else set()
    work = folder / f"on-{arguments.hosts}"
    runs = work / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "kit-faults", str(runs)], check=True)
    hosts = Hosts(work, arguments.hosts)
    try:
        if not (work / f"reference-{arguments.hosts}/final").is_dir():
            trial = Trial(-1, hosts, work, random.Random(0), 10 * arguments.timeout, list(hosts.all))
            trial.start()
            trial.wait_until_gone()
            assert not any(trial.statuses().values()), [run.text for run in trial.runs]
            shutil.copytree(trial.output, work / f"reference-{arguments.hosts}")
            shutil.rmtree(trial.output)
        for seed in seeds:
            if seed not in done:
                found = one(hosts, work, seed, arguments.timeout)
                with results.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                print(line_of(found), flush=True)
                for host in hosts.all:
                    hosts.restore(host)
                    host.started.clear()
    finally:
        hosts.close()
        subprocess.run(["umount", str(runs)], check=False)
    summary(results)


if __name__ == "__main__":
    main()
