"""Compare what adamw_bf16 learns with float32 weights, and with bf16 weights that are rounded to the nearest.

    python benchmarks/bf16_weights.py --model_name_or_path M --dataset D --max_steps 300 [any finetune flag]

Runs recipes/finetune.py three times on one process, with the same data in the same order. Prints a Markdown table of
the mean loss of each tenth of the steps.
"""

import json
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "recipes/finetune.py"
NEAREST = "--nearest"
RUNS = {
    "float32, adamw_torch": ["--optim", "adamw_torch"],
    "bf16, adamw_bf16": ["--optim", "adamw_bf16"],
    "bf16, rounded to the nearest": [NEAREST, "--optim", "adamw_bf16"],
}


def main() -> None:
    columns = []
    with tempfile.TemporaryDirectory() as folder:
        for title, flags in RUNS.items():
            print(f"{title} ...", file=sys.stderr, flush=True)
            output = Path(folder) / str(len(columns))
            columns.append(
                tenths(run([*flags, "--config", "single", "--output_dir", str(output), *sys.argv[1:]], output))
            )
    print(f"| tenth of the steps | {' | '.join(RUNS)} |\n|{'---|' * (len(RUNS) + 1)}")
    for i, row in enumerate(zip(*columns, strict=True), start=1):
        print(f"| {i} | {' | '.join(f'{loss:.4f}' for loss in row)} |")


def run(flags: list[str], output: Path) -> list[float]:
    """Run this file as the script, and return the loss of each step."""
    done = subprocess.run([sys.executable, __file__, "--run", *flags], capture_output=True, text=True, timeout=7200)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    rows = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "grad_norm" in row]


def tenths(losses: list[float]) -> list[float]:
    size = len(losses) // 10
    return [sum(losses[i * size : (i + 1) * size]) / size for i in range(10)]


def finetune() -> None:
    """Be recipes/finetune.py, whose update rounds to the nearest if the flag says so."""
    del sys.argv[1]
    if NEAREST in sys.argv:
        sys.argv.remove(NEAREST)
        sys.path.insert(0, str(ROOT))
        import kit.train.optim.bf16_adamw

        kit.train.optim.bf16_adamw.stochastic_round = lambda exact, noise: exact  # to bf16 it is copied then
    sys.argv[0] = str(SCRIPT)
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    finetune() if sys.argv[1:2] == ["--run"] else main()
