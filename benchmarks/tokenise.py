"""The kit's tokenisation against a plain ``datasets.map``, with equally many processes: time, and processor time.

    python benchmarks/tokenise.py --tokenizer T --dataset D.jsonl --columns question=prompt,answer=completion \\
        [--repeat 20] [--processes 2] [--rounds 3] [--chat_template NAME]

Both read the same JSON Lines file and end with token ids on disk. The plain map joins prompt and completion and
tokenises them in batches (with ``--chat_template``: calls ``apply_chat_template`` row by row, on two messages or on a
column ``messages``), and knows no mask, no checks and no truncation. Rounds alternate. Then the kit opens its cache
again, in a new process each time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from transformers import AutoTokenizer  # noqa: E402

from kit.config.recipe import Recipe  # noqa: E402
from kit.data.chat.template import resolve_template  # noqa: E402
from kit.data.open import open_data  # noqa: E402
from kit.data.samples.dataset import open_datasets  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--columns", default="")
    parser.add_argument("--chat_template")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reopen", action="store_true", help=argparse.SUPPRESS)  # in the new processes
    options = parser.parse_args()
    if options.reopen:
        started = time.perf_counter()
        data, _ = with_kit(options, Path(options.dataset))
        print(time.perf_counter() - started, len(data.train))
        return
    with tempfile.TemporaryDirectory() as folder:
        big = Path(folder) / "big.jsonl"
        with big.open("w") as file:
            lines = Path(options.dataset).read_text().splitlines()
            for number in range(options.repeat):
                for line in lines:
                    file.write(json.dumps(json.loads(line) | {"copy": number}) + "\n")
        kit = []  # tokens per second of each round
        plain = []
        work = {"kit": 0.0, "datasets.map": 0.0}  # processor seconds
        for number in range(options.rounds):
            os.environ["KIT_CACHE"] = f"{folder}/kit-{number}"
            started = processor_seconds()
            data, seconds = with_kit(options, big)
            work["kit"] += processor_seconds() - started
            kit.append(int(data.train.lengths.sum()) / seconds)
            started = processor_seconds()
            num_tokens, seconds = with_datasets(options, big, f"{folder}/datasets-{number}")
            work["datasets.map"] += processor_seconds() - started
            plain.append(num_tokens / seconds)
        time.sleep(3)  # the hashes of files younger than two seconds are not stored
        command = [sys.executable, __file__, *sys.argv[1:], "--dataset", str(big), "--reopen"]
        reopened = [
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(3)
        ]
    ratios = [a / b for a, b in zip(kit, plain, strict=True)]
    print(f"{len(data.train)} samples, {data.train.lengths.sum()} tokens, {options.processes} processes\n")
    print("| | tokens per second, median | range | processor seconds a round |\n|---|---|---|---|")
    for name, values in (("kit", kit), ("datasets.map", plain)):
        shown = f"{statistics.median(values):,.0f} | {min(values):,.0f} to {max(values):,.0f}"
        print(f"| {name} | {shown} | {work[name] / options.rounds:.1f} |")
    print(f"\nratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    times = sorted(float(words[0]) for words in reopened)
    print(f"cache opened again in {times[0]:.2f} to {times[-1]:.2f} s (first of them hashes what is new)")


def processor_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    return sum(os.times()[:4])


def with_kit(options: argparse.Namespace, path: Path) -> tuple[object, float]:
    recipe = Recipe(
        model_name_or_path=options.tokenizer,
        dataset=str(path),
        dataset_columns=options.columns,
        chat_template=options.chat_template,
        dataset_num_proc=options.processes,
    )
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    started = time.perf_counter()
    data = open_data(
        recipe,
        open_datasets(recipe.dataset_entries, recipe.eval_dataset_entries, recipe.streaming),
        tokenizer,
        10**9,
        eval_settings=recipe,
        seed=recipe.seed,
        global_batch_size=recipe.global_batch_size,
    )
    return data, time.perf_counter() - started


def with_datasets(options: argparse.Namespace, path: Path, cache: str) -> tuple[int, float]:
    import datasets

    datasets.disable_progress_bars()
    names = {ours: theirs for theirs, ours in (pair.split("=") for pair in options.columns.split(",") if pair)}
    prompt, completion = names.get("prompt", "prompt"), names.get("completion", "completion")
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    template = resolve_template(tokenizer, options.chat_template) if options.chat_template else None

    def joined(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = [f"{a}\n{b}" for a, b in zip(rows[prompt], rows[completion], strict=True)]
        return {"input_ids": tokenizer(texts).input_ids}

    def rendered(row: dict[str, str]) -> dict[str, list[int]]:
        pair = [("user", prompt), ("assistant", completion)]
        messages = row.get("messages") or [{"role": role, "content": row[key]} for role, key in pair]
        return {"input_ids": tokenizer.apply_chat_template(messages, chat_template=template, return_dict=False)}

    started = time.perf_counter()
    dataset = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=cache)
    mapped = dataset.map(
        rendered if template else joined,
        batched=not template,
        num_proc=options.processes,
        remove_columns=dataset.column_names,
    )
    seconds = time.perf_counter() - started
    num_tokens = sum(len(ids) for ids in mapped.with_format("numpy")["input_ids"])
    return num_tokens, seconds


if __name__ == "__main__":
    main()
