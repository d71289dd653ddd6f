"""Many rows with an image each: seconds to the first step, memory of the process, images a second, waiting of the step.

    python benchmarks/image_rows.py FOLDER [--rows 100000] [--side 224] [--steps 200] [any finetune flag]

Writes JPEGs of 64 x 64 to ``side`` x ``side`` pixels into ten parquet files in FOLDER, as datasets.Image does, unless
they are there; trains tiny-vision on them with recipes/finetune.py on the CPU, and reads its log; and gives as many
images to the image processor in a bare loop. Seconds of the CPU do not depend on other work on the machine.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
NUM_FILES, BATCH = 10, 32
# 224 x 224 pixels are 64 tokens.
FLAGS = ["--recipe", "tiny-vision", "--config", "single", "--max_length", "256", "--max_pixels", "50176"]
FLAGS += ["--global_batch_size", str(BATCH), "--eval_on_start", "false", "--save_steps", "0"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--steps", type=int, default=200)
    args, flags = parser.parse_known_args()
    data = args.folder / "data"
    if not data.exists():
        write_rows(data, args.rows, args.side)
    own = [*FLAGS, "--dataset", str(data), "--max_steps", str(args.steps), *flags]
    for name in ("cold", "again"):
        output = args.folder / name
        seconds, cpu, memory = run([*own, "--output_dir", str(output)], args.folder / "cache")
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if "loss" in row]
        thirds = [max(memory[i * len(memory) // 3 : (i + 1) * len(memory) // 3]) for i in range(3)]
        print(f"{name}: first step after {seconds:.0f} s, {cpu:.0f} of the CPU; MiB in thirds of the steps: {thirds}")
        shares = [row["data_wait_share"] for row in steps[1:] if "data_wait_share" in row]
        print(f"waiting for data: {sum(shares) / len(shares):.1%} of the steps' time", flush=True)
    feed_beside_processor(own, data, args.steps)


def write_rows(folder: Path, num_rows: int, side: int) -> None:
    """Write rows with a question, an answer, and a picture of random colours."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(NUM_FILES):
        rows = []
        for i in range(num_rows // NUM_FILES):
            colours = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
            width, height = rng.integers(64, side + 1, 2).tolist()
            file = io.BytesIO()
            colours.resize((width, height), Image.Resampling.BILINEAR).save(file, "JPEG", quality=85)
            rows.append(
                {
                    "images": [{"bytes": file.getvalue(), "path": None}],
                    "instruction": f"<image>What is picture {number}-{i}?",
                    "output": "Colours.",
                }
            )
        pq.write_table(pa.Table.from_pylist(rows), folder / f"train-{number:05d}.parquet", row_group_size=1000)


def run(flags: list[str], cache: Path) -> tuple[float, float, list[int]]:
    """Train. Returns the seconds until the first step had its line, those of the CPU, and MiB from then on.

    Memory is that of the process alone, without pages of files, which the system may take back.
    """
    output = Path(flags[flags.index("--output_dir") + 1])
    began, first, cpu, memory = time.perf_counter(), 0.0, 0.0, list[int]()
    environment = os.environ | {"KIT_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "recipes/finetune.py"), *flags]
    with open(f"{output}.log", "w") as log, subprocess.Popen(command, stdout=log, stderr=log, env=environment) as done:
        while done.poll() is None:
            metrics = output / "metrics.jsonl"
            if not first and metrics.exists() and metrics.stat().st_size:
                first, cpu = time.perf_counter() - began, sum(psutil.Process(done.pid).cpu_times()[:4])
            if first:
                status = Path(f"/proc/{done.pid}/status").read_text()
                memory += [int(line.split()[1]) >> 10 for line in status.splitlines() if line.startswith("RssAnon")]
            time.sleep(0.2)
    if done.returncode:
        sys.exit(Path(f"{output}.log").read_text())
    return first, cpu, memory


def feed_beside_processor(flags: list[str], data: Path, num_steps: int) -> None:
    """Print images for each second of the CPU: of the feed alone, and of the image processor in a bare loop."""
    os.environ["KIT_CACHE"] = str(data.parent / "cache")
    from kit.config.command_line import read_command_line
    from kit.data.feed.data_ranks import Ranks
    from kit.preflight.preflight import check
    from kit.strategy.launch import launch

    recipe, topology = launch.resolve(read_command_line([*flags, "--output_dir", str(data.parent / "feed")]))
    checked = check(recipe, topology, "feed")
    feed = checked.data.open_feed(checked.recipe, Ranks(), 0, {})
    processor: Any = checked.data.media.processor.image_processor
    images = pq.read_table(sorted(data.glob("*.parquet"))[0], columns=["images"]).slice(0, BATCH * num_steps)
    contents = [row["images"][0]["bytes"] for row in images.to_pylist()]
    feed.take(0)
    began = time.process_time()
    for step in range(1, num_steps):
        feed.take(step)
    of_feed = BATCH * (num_steps - 1) / (time.process_time() - began)
    began = time.process_time()
    size = checked.recipe.micro_batch_size
    for i in range(0, len(contents), size):
        pictures = [Image.open(io.BytesIO(content)).convert("RGB") for content in contents[i : i + size]]
        processor(images=pictures, return_tensors="pt")
    bare = len(contents) / (time.process_time() - began)
    print(f"images for a second of the CPU: feed {of_feed:.0f}, decoding and {type(processor).__name__} {bare:.0f}")


if __name__ == "__main__":
    main()
