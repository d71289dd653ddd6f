"""The first hour on a machine with NVIDIA GPUs: what no CPU can check, then speed and memory beside the plan.

    python benchmarks/gpu.py --out gpu                    # all parts; the same command again goes on where it stopped
    python benchmarks/gpu.py --out gpu --part varlen syncs   # these, also if they are done
    python benchmarks/gpu.py --list
    python benchmarks/gpu.py --out /tmp/gpu --rehearse    # tiny shapes on a CPU: does it all run?

Each part runs in a process of its own for at most ten minutes, and writes ``OUT/<part>.json`` and ``OUT/<part>.log``.
A part that has its JSON is done; one that failed is tried again. ``OUT/<date>-gpu.md`` holds the tables: each figure
with its bound, each run beside its plan, each kind of work beside its computed milliseconds. Models are random weights
of public shapes (recipes/shapes/): nothing is downloaded. Models and data of ``OUT/work`` take up to 30 GB.

Ends with status 1 if a part failed or a figure is outside its bounds.
"""

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import psutil  # noqa: E402
from gpu_bench import Bench, Figure, Skipped  # noqa: E402
from gpu_checks import CHECKS  # noqa: E402
from gpu_speed import DEFAULT, LEDGER, LOSSY, beside_trl, cases, ledger, measure, verdict  # noqa: E402

from kit.tools.plan.hardware import this_machine  # noqa: E402

PART_SECONDS = 600
TRL = [(size, method, levers) for size, method in (("1b", "full"), ("8b", "lora")) for levers in (False, True)]


def parts() -> dict[str, Callable[[Bench], Any]]:
    """All parts by name, in the order in which they run. Each returns what its JSON holds as ``result``."""
    runs: dict[str, Callable[[Bench], Any]] = {case.name: partial(measure, case=case) for case in cases()}
    # The defaults first: if there is no time for more, these are what counts.
    found = {name: run for name, run in runs.items() if name.endswith(DEFAULT)}
    found |= {name: partial(_check, check) for name, check in CHECKS.items()}
    found |= {"ledger": ledger} | runs
    for size, method, levers in TRL:
        name = f"trl-{size}-{method}{'-levers' if levers else ''}"
        found[name] = partial(beside_trl, size=size, method=method, levers=levers)
    return found


def rehearsed() -> list[str]:
    """The parts that a rehearsal runs: all but those that differ from another one in the model's size alone."""
    alike = {(case.method, case.kind, case.lever): case.name for case in reversed(cases())}
    others = {case.name for case in cases()} - set(alike.values())
    return [name for name in parts() if name not in others]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for results, models and data")
    parser.add_argument("--part", nargs="+", choices=parts(), metavar="NAME", help="only these, again if they are done")
    parser.add_argument("--list", action="store_true", help="print the names of all parts")
    parser.add_argument("--rehearse", action="store_true", help="run all with tiny shapes on a CPU")
    parser.add_argument("--steps", type=int, default=20, help="steps timed in a run, after its first five")
    parser.add_argument("--samples", type=int, default=8, help="global batch of a run whose steps are timed")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side, beside TRL")
    args = parser.parse_args()
    if args.list:
        print("\n".join(parts()))
        return 0
    if args.out is None:
        parser.error("--out: the folder for results, models and data")
    if not args.rehearse and this_machine() is None:
        parser.error("no NVIDIA GPU answers nvidia-smi; --rehearse runs all parts with tiny shapes on a CPU")
    bench = Bench(args.out / "work", args.rehearse, args.steps, args.samples, args.rounds)
    bench.folder.mkdir(parents=True, exist_ok=True)
    for name in args.part or (rehearsed() if args.rehearse else parts()):
        path = args.out / f"{name}.json"
        if not args.part and path.exists() and json.loads(path.read_text())["state"] != "failed":
            continue
        record = run(name, bench, args.out / f"{name}.log")
        path.write_text(json.dumps(record, indent=1))
        print(f"{name}: {record['state']} in {record['seconds']:.0f} s {record['why'][:200]}", flush=True)
    records = {name: json.loads(path.read_text()) for name in parts() if (path := args.out / f"{name}.json").exists()}
    page = args.out / f"{datetime.date.today()}-gpu.md"
    page.write_text("\n".join(report(records, bench)))
    print(page)
    return 0 if all(map(is_good, records.values())) else 1


def run(name: str, bench: Bench, log: Path) -> dict[str, Any]:
    """Run a part in a process of its own, and return its record.

    This process never touches a GPU, so that the part's own, which is forked, can.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_here, args=(name, bench, log, sender))
    began = time.perf_counter()
    record = {"state": "failed", "why": f"longer than {PART_SECONDS} s; {log} has its output", "result": None}
    process.start()
    try:
        if receiver.poll(PART_SECONDS):
            record = receiver.recv()
    except EOFError:
        record["why"] = f"the process died; {log} has its output"
    finally:  # also after Ctrl-C
        with contextlib.suppress(psutil.NoSuchProcess):
            part = psutil.Process(process.pid)
            for each in [part, *part.children(recursive=True)]:  # runs have sessions of their own
                each.kill()
        process.join()
    return {"part": name, **record, "seconds": time.perf_counter() - began}


def _run_here(name: str, bench: Bench, log: Path, sender: Any) -> None:
    os.setsid()
    with log.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
        try:
            record = {"state": "done", "why": "", "result": parts()[name](bench)}
        except Skipped as error:
            record = {"state": "skipped", "why": str(error), "result": None}
        except BaseException as error:
            traceback.print_exc()
            record = {"state": "failed", "why": f"{type(error).__name__}: {error}"[:500], "result": None}
    sender.send(record)
    time.sleep(PART_SECONDS)  # until the other process ends this one, with all that it started


def _check(check: Callable[[Bench], list[Figure]], bench: Bench) -> list[dict[str, Any]]:
    """The figures of a check as JSON."""
    return [asdict(figure) for figure in check(bench)]


def is_good(record: dict[str, Any]) -> bool:
    """Whether a part did not fail, and all its figures are within their bounds."""
    figures = record["result"] if record["part"] in CHECKS and record["result"] else []
    return record["state"] != "failed" and all(Figure(**each).holds for each in figures)


def report(records: dict[str, Any], bench: Bench) -> list[str]:
    """The page: a table for each kind of part that has a result, and what has none, with the reason."""
    done = {name: record["result"] for name, record in records.items() if record["state"] == "done"}
    lines = [*_title(bench), *_table_of_checks(done), *_table_of_runs(done), *_table_of_ledger(done, bench)]
    if rows := [done[name]["row"] for name in done if name.startswith("trl-")]:
        lines += ["", "## Beside TRL", "", "Columns as in benchmarks/against_trl.py.", ""]
        lines += [
            "| case | s a step, TRL | the kit | ratio | peak GiB, TRL | the kit | loss |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += rows
    if rest := [record for record in records.values() if record["state"] != "done"]:
        lines += ["", "## Without a result", ""]
        lines += [f"- {record['part']}: {record['state']}: {record['why']}" for record in rest]
    if missing := [name for name in (rehearsed() if bench.rehearse else parts()) if name not in records]:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    return [*lines, ""]


def _title(bench: Bench) -> list[str]:
    found = this_machine()
    machine = f"{found[1]} x {found[0].name}" if found and not bench.rehearse else f"CPU ({platform.machine()})"
    names = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    driver = ""
    if found and not bench.rehearse:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = f"driver {subprocess.run(query, capture_output=True, text=True).stdout.splitlines()[0]}; "
    return [
        f"# {datetime.date.today()}: {'a rehearsal, not measured on a GPU: ' if bench.rehearse else ''}{machine}",
        "",
        f"{driver}{', '.join(f'{name} {version(name)}' for name in names)}; commit {commit.strip()}; "
        f"`{' '.join(['python', *sys.argv])}`",
    ]


def _table_of_checks(done: dict[str, Any]) -> list[str]:
    lines = [
        "",
        "## What no CPU can check",
        "",
        "| part | figure | measured | bound | verdict |",
        "|---|---|---|---|---|",
    ]
    for name in CHECKS:
        for figure in [Figure(**each) for each in done.get(name, [])]:
            bounds = [f"at least {figure.at_least:g}"] if figure.at_least is not None else []
            bounds += [f"at most {figure.at_most:g}"] if figure.at_most is not None else []
            judged = ("holds" if figure.holds else "**does not hold**") if bounds else "-"
            value = f"{figure.value:.4g} {figure.unit}".strip()
            lines.append(f"| {name} | {figure.name} | {value} | {', '.join(bounds) or '-'} | {judged} |")
    return lines


def _table_of_runs(done: dict[str, Any]) -> list[str]:
    lines = ["", "## Runs beside their plan", ""]
    lines += [
        "Random weights, rows of text of lognormal lengths to 4,096 tokens. Rates are medians, padding included.",
        "",
    ]
    lines += [
        "| model | method | rows | lever | tokens/s | planned | no padding | TFLOP/s | peak GiB | planned | verdict |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|---|---|"]
    for case in cases():
        if not (found := done.get(case.name)):
            continue
        low, high = found.get("planned_tokens_per_second", (None, None))
        planned_bytes = found.get("planned_bytes")
        plain = None if case.lever in LOSSY else done.get(f"{case.size}-{case.method}-{case.kind}-plain")
        cells = [
            case.size,
            case.method,
            case.kind,
            case.lever,
            f"{found['tokens_per_second']:,.0f}",
            "no plan" if low is None else f"{low:,.0f} to {high:,.0f}",
            f"{found['useful_tokens_per_second']:,.0f}",
            f"{found['tflops_per_second']:.3g}",
            f"{found['peak_bytes'] / 2**30:.2f}",
            "no plan" if planned_bytes is None else f"{planned_bytes / 2**30:.2f}",
            verdict(found, plain),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _table_of_ledger(done: dict[str, Any], bench: Bench) -> list[str]:
    if "ledger" not in done:
        return []
    found = done["ledger"]
    lines = ["", "## Where a step's milliseconds go", ""]
    lines += ["8B LoRA, one row of 4,096 tokens, forward and backward, each kind of work timed alone. Computed: by the"]
    lines += ["roofline of an H100 without these levers; reachable: with all of them.", ""]
    lines += [f"| work | computed | reachable | {' | '.join(found)} | verdict |"]
    lines += [f"|---|---|---|{'---|' * len(found)}---|"]
    for name, (before, reachable) in LEDGER.items():
        best = min(lines_of[name] for lines_of in found.values())
        judged = "reached" if best <= 1.1 * reachable else f"{best - reachable:.1f} ms above"
        judged = "-" if bench.rehearse else judged  # another model, on another device
        cells = [f"{lines_of[name]:.1f}" for lines_of in found.values()]
        lines.append(f"| {name} | {before} | {reachable} | {' | '.join(cells)} | {judged} |")
    return lines


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the part that runs ends with this process
    sys.exit(main())
