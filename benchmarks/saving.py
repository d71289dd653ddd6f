"""What a save costs: how long it holds the training loop up, the host memory it needs, and what it costs the steps.

    python benchmarks/saving.py [--layers 12] [--hidden 768] [--method full lora] [--folder DIR]

A random Llama on the CPU with AdamW, one process; the checkpoint goes to DIR (default: the system's temporary folder),
synced to its disk. Prints a Markdown table: bytes of a checkpoint; seconds the loop is held up by one save (median of
five); seconds until it is complete; by how much saves raise the peak of resident memory above that of training alone,
as a multiple of the checkpoint (Linux only); and how much longer a training step takes while one is being written.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from kit.checkpoint.manifest import MANIFEST, name_of
from kit.checkpoint.save import Saver
from kit.config.recipe import Recipe

NUM_SAVES = 5
ALONE: Any = SimpleNamespace(process_index=0, num_processes=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--method", nargs="+", choices=("full", "lora"), default=["full", "lora"])
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    args = parser.parse_args()
    print("| method | async_save | bytes | loop held up, s | complete after, s | host memory | step meanwhile |")
    print("|---|---|---|---|---|---|---|")
    for method in args.method:
        model, optimizer = build(args.layers, args.hidden, method)
        for in_background in (False, True):
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                cells = measure(model, optimizer, Path(folder), in_background)
            print(f"| {method} | {str(in_background).lower()} | {' | '.join(cells)} |", flush=True)


def build(layers: int, hidden: int, method: str) -> tuple[Any, torch.optim.Optimizer]:
    shape = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 4 * hidden, "vocab_size": 32000}
    model: Any = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=hidden // 64))
    if method == "lora":
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    return model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)


def step(model: Any, optimizer: torch.optim.Optimizer) -> float:
    """Do one small training step, and return its duration in seconds."""
    start = time.perf_counter()
    ids = torch.randint(32000, (1, 64))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def measure(model: Any, optimizer: torch.optim.Optimizer, folder: Path, in_background: bool) -> list[str]:
    recipe = Recipe(model_name_or_path="m", dataset="d", async_save=in_background, save_total_limit=1)
    saver = Saver(ALONE, recipe, folder, {"identity": {}, "strategy": {}, "versions": {}}, timeout_seconds=1800)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts afresh
    alone = statistics.median(step(model, optimizer) for _ in range(4))
    before = peak_bytes()
    held, complete, meanwhile = [], [], []
    for number in range(1, NUM_SAVES + 1):
        start = time.perf_counter()
        saver.save(model, optimizer, {"step": number})
        held.append(time.perf_counter() - start)
        manifest = folder / name_of(number) / MANIFEST
        while in_background and not manifest.is_file():
            meanwhile.append(step(model, optimizer))
        saver.wait()
        complete.append(time.perf_counter() - start)
    size = sum(path.stat().st_size for path in folder.glob("step-*/*"))
    slower = f"x {statistics.median(meanwhile) / alone:.2f}" if meanwhile else ""
    memory = f"x {(peak_bytes() - before) / size:.2f}"
    return [f"{size:,}", f"{statistics.median(held):.3f}", f"{statistics.median(complete):.3f}", memory, slower]


def peak_bytes() -> int:
    """The most memory that this process had resident since its peak started afresh."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


if __name__ == "__main__":
    main()
