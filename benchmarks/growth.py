"""What grows with the size of the data or of a run, and how fast: CPU seconds and memory at three sizes each.

    python benchmarks/growth.py [NAME ...] [--sizes N N N] [--save now.json] [--before old.json] [--picture growth.png]

Each size is measured in a process of its own. Preparing the input does not count: CPU seconds, of all threads, and the
peak of resident memory begin with the part that is measured. An exponent is the slope between the smallest and the
largest size on logarithmic axes: 0 is constant, 1 linear, 2 quadratic. Below a hundredth of a second or a megabyte
there is none. With TRL installed (``pip install trl==1.16.0``) its tokenisation stands beside the kit's.
``--save`` keeps the figures, ``--before`` draws those of an earlier commit beside. The peaks need Linux; pages of
mapped files count, though all processes share them.
"""

import argparse
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "recipes/tiny/model"
Measured = Callable[[], Any]
Results = dict[str, list[tuple[int, dict[str, float]]]]  # of each subject: (size, figures)
FLOORS = {"CPU seconds": 0.01, "peak MB": 1.0}  # below it a figure has no exponent
FORMS = {"CPU seconds": ".2f", "peak MB": ".0f"}


class Subject(NamedTuple):
    """Something that a run does, at three sizes."""

    prepare: Callable[[int], Measured]  # makes the input of a size, and returns what is measured
    sizes: tuple[int, int, int]
    unit: str  # of the sizes


SUBJECTS: dict[str, Subject] = {}  # by name, in the order of the table


def subject(unit: str, *sizes: int) -> Callable[[Callable[[int], Measured]], Callable[[int], Measured]]:
    """Register a function as a subject under its name."""

    def register(prepare: Callable[[int], Measured]) -> Callable[[int], Measured]:
        small, middle, large = sizes
        SUBJECTS[prepare.__name__] = Subject(prepare, (small, middle, large), unit)
        return prepare

    return register


# --- data


def _samples(*sizes: int, seed: int = 0) -> Any:
    """Samples of data sets with so many samples each, mapped from files as a run's are."""
    from kit.data.samples.rows import SAMPLE
    from kit.data.samples.samples import Samples, Store

    rng = np.random.default_rng(seed)
    stores = []
    for size in sizes:
        made = np.zeros(size, SAMPLE)
        made["length"] = made["num_targets"] = rng.integers(20, 500, size)
        made["ids_hash"], made["text_hash"] = rng.integers(0, 2**63, (2, size), np.uint64)
        path = Path(tempfile.mkdtemp(dir=_folder())) / "samples.bin"
        made.tofile(path)
        arrays = {"samples": np.memmap(path, SAMPLE, mode="r"), "input_ids": np.zeros(0), "weight_codes": np.zeros(0)}
        stores.append(Store(None, path.parent.name, arrays, {}, str(seed)))  # type: ignore[arg-type]
    return Samples(stores)


def _folder() -> str:
    """The folder of this measurement, which is deleted after it."""
    return tempfile.gettempdir()


@subject("samples", 100_000, 1_000_000, 10_000_000)
def leak_check(num: int) -> Measured:
    """Look for the evaluation samples, one in a hundred, among those to train on."""
    from kit.data.samples.samples import duplicates

    train, evaluation = _samples(num), _samples(num // 100, seed=1)
    return lambda: duplicates(evaluation, train)


@subject("files", 1_000, 3_000, 10_000)
def lanes_of_a_stream(num: int) -> Measured:
    """Divide the files of a stream over the lanes of a global batch of the same size."""
    from kit.data.feed.lanes import num_sub_streams

    sizes = np.random.default_rng(0).integers(10_000, 1_000_000, num).tolist()
    return lambda: num_sub_streams(sizes, num - 1)


def _mixture(num: int, num_datasets: int = 200, unit: str = "tokens", **options: Any) -> Any:
    from kit.data.feed.order import Mixture, Order

    lengths = np.random.default_rng(0).integers(20, 500, num, dtype=np.int32)
    dataset_ids = (np.arange(num) * num_datasets // num).astype(np.int16)
    mixture = Mixture(np.linspace(1, 2, num_datasets).tolist(), unit)  # type: ignore[arg-type]
    return lambda: Order(lengths, dataset_ids, 0, 64, mixture, **options)


@subject("samples", 100_000, 1_000_000, 10_000_000)
def shares_of_a_mixture(num: int) -> Measured:
    """How many samples each of 200 data sets has in an epoch."""
    return _mixture(num)


@subject("samples", 100_000, 1_000_000, 10_000_000)
def notes_of_a_mixture(num: int) -> Measured:
    """The lines that say how often each of 200 data sets is used."""
    from types import SimpleNamespace

    from kit.data.feed.feed import Feed

    samples, order = _samples(*[num // 200] * 200), _mixture(num)()
    feed: Any = Feed.__new__(Feed)
    feed._samples, feed._order, feed._settings = samples, order, SimpleNamespace(mixing="tokens")
    order.epoch(0)  # which the run needs too
    return lambda: feed._mixing_notes()


@subject("samples", 1_000_000, 10_000_000, 100_000_000)
def order_of_an_epoch(num: int) -> Measured:
    """The first global batch of a run."""
    from kit.data.feed.order import Order

    lengths, dataset_ids = np.broadcast_to(np.int32(9), num), np.broadcast_to(np.int16(0), num)
    return lambda: Order(lengths, dataset_ids, 0, 64).batch(0)


@subject("answers", 100, 300, 1_000)
def answers_of_a_conversation(num: int) -> Measured:
    """Find the answers of one long conversation."""
    from kit.data.chat.shipped import SHIPPED
    from kit.data.chat.turns import Drafters

    drafters = Drafters(SHIPPED["chatml"].source, _tokenizer(), "assistant")
    messages = []
    for i in range(num):
        messages += [{"role": "user", "content": f"Question {i}?"}, {"role": "assistant", "content": f"Answer {i}."}]
    _, drafter = drafters.of(False, {})
    drafter.drafts(messages[:4], 0, None)  # compiles the template
    return lambda: drafter.drafts(messages, 0, None)


def _tokenizer() -> Any:
    """A tokenizer of bytes with the tokens of ChatML."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


@subject("samples", 300, 1_000, 3_000)
def references_of_an_evaluation(num: int) -> Measured:
    """Evaluate with generation, without the model: what is kept of references of 1,000 tokens."""
    from contextlib import nullcontext
    from types import SimpleNamespace
    from unittest import mock

    from kit import evaluate
    from kit.config.settings.evaluation import EvalSettings

    rng = np.random.default_rng(0)
    samples = _samples(num)
    lengths = np.full(num, 1_100, np.int32)
    array = np.array(samples.stores[0].arrays["samples"])
    array["length"], array["start"] = lengths, np.arange(num) * 1_100
    ids = rng.integers(0, 250, num * 1_100, dtype=np.int32)
    codes = np.tile((np.arange(1_100) >= 100).astype(np.uint8), num)
    arrays = {"samples": array, "input_ids": ids, "weight_codes": codes}
    store = samples.stores[0].__class__(None, "a", arrays, {"weights": [0.0, 1.0]}, "a")
    samples = samples.__class__([store])
    accelerator = SimpleNamespace(device="cpu")
    from kit.data.feed.ranks import Ranks

    prepared: Any = SimpleNamespace(
        accelerator=accelerator,
        ranks=Ranks(),
        model=SimpleNamespace(training=False, eval=lambda: None, train=lambda on: None),
    )
    settings = EvalSettings(predict_with_generate=True, max_new_tokens=1)
    tokenizer = _tokenizer()
    parts = {
        "_loss": lambda *_: {},
        "generating": lambda *_: nullcontext(),
        "_generate": lambda generate, prompts, *_: (["a"] * len(prompts), [True] * len(prompts)),
        "gather_object": lambda given: given,
    }

    def measured() -> None:
        with mock.patch.multiple(evaluate, **parts):
            given = prepared, settings, 8, tokenizer, samples, lambda items, name, total: items
            evaluate.evaluate(*given, train_on="assistant", seed=0)

    return measured


# --- a run


def _run_folder(num_steps: int, num_datasets: int = 0, num_starts: int = 1) -> Path:
    """The output folder of a run of so many steps, each of them logged."""
    from kit.config.recipe import Recipe
    from kit.strategy.strategies import SINGLE
    from kit.strategy.topology import ActualStrategy

    folder = Path(tempfile.mkdtemp(dir=_folder()))
    strategy = ActualStrategy(
        type=SINGLE,
        config="single",
        num_processes=1,
        num_replicas=1,
        mixed_precision="no",
        device="cpu",
        rehearsal=False,
        sharded_layers=None,
        num_threads=1,
        trainable_parameters=1,
    )
    record = {
        "recipe": Recipe(model_name_or_path="m", method="lora", dataset="d.jsonl").model_dump(mode="json"),
        "strategy": strategy.record(),
        "data": {"fingerprint": "a", "train": {}, "sources": [{"name": "d"}]},
        "versions": {},
        "starts": [
            {"step": i * num_steps // num_starts, "time": "2026-01-01T00:00:00+00:00", "changed": []}
            for i in range(num_starts)
        ],
    }
    (folder / "run.json").write_text(json.dumps(record))
    with (folder / "metrics.jsonl").open("w") as file:
        for step, noise in enumerate(np.random.default_rng(0).random(num_steps).tolist(), 1):
            row = {"step": step, "epoch": 0.1, "loss": 2 + noise, "learning_rate": 1e-3, "grad_norm": noise}
            row |= {"supervised_tokens": 4000, "tokens": 9000, "tokens_per_second": 9e3, "peak_memory_bytes": 1 << 30}
            row |= {"data_wait_share": noise, "padding_share": noise, "tokens_seen": 9000 * step, "seconds": step / 2}
            for i in range(num_datasets):
                row |= {f"loss/set{i}": 2 + noise, f"tokens/set{i}": 9, f"supervised_tokens/set{i}": i}
            file.write(json.dumps(row) + "\n")
    return folder


@subject("logged steps", 10_000, 100_000, 1_000_000)
def report_of_a_run(num: int) -> Measured:
    """Write the report of a run that was started ten times."""
    from kit.tools.report.run_page import write_report

    folder = _run_folder(num, num_starts=10)
    return lambda: write_report(folder)


@subject("data sets", 20, 60, 200)
def report_by_data_set(num: int) -> Measured:
    """Write the report of a run of 2,000 steps with many data sets."""
    from kit.tools.report.run_page import write_report

    folder = _run_folder(2_000, num)
    return lambda: write_report(folder)


@subject("logged steps", 10_000, 100_000, 1_000_000)
def resume_of_the_log(num: int) -> Measured:
    """Delete the last 100 steps from the log, which the run repeats."""
    from kit.run.log import _drop_lines_after

    path = _run_folder(num) / "metrics.jsonl"
    return lambda: _drop_lines_after(path, num - 100, -1)


# --- the same work by TRL


def _pairs(num: int) -> Path:
    """A file of prompts of 60 words and completions of 100."""
    words = "the of and to in is that for it as was with be by on not he his but at are this have from".split()
    rng = np.random.default_rng(0)
    path = Path(tempfile.mkdtemp(dir=_folder())) / "pairs.jsonl"
    with path.open("w") as file:
        for i in range(num):
            prompt, completion = (" ".join(rng.choice(words, size)) for size in (60, 100))
            file.write(json.dumps({"prompt": f"{i}: {prompt}", "completion": f" {completion}."}) + "\n")
    return path


@subject("rows", 1_000, 10_000, 100_000)
def tokenised_rows(num: int) -> Measured:
    """Tokenise prompts and completions, in one process."""
    os.environ["KIT_CACHE"] = tempfile.mkdtemp(dir=_folder())
    from transformers import AutoTokenizer

    from kit.config.recipe import Recipe
    from kit.data.open import open_data
    from kit.data.samples.dataset import open_datasets

    recipe = Recipe(model_name_or_path=str(MODEL), dataset=str(_pairs(num)), dataset_num_proc=1, max_length=1024)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    options = {"seed": 0, "global_batch_size": 64}

    def measured() -> None:
        datasets = open_datasets(recipe.dataset_entries, recipe.eval_dataset_entries, recipe.streaming)
        open_data(recipe, datasets, tokenizer, 10**9, eval_settings=recipe, **options)

    return measured


@subject("rows", 1_000, 10_000, 100_000)
def tokenised_rows_of_trl(num: int) -> Measured:
    """The same rows by TRL's SFTTrainer, when it is made."""
    from datasets import Dataset, disable_progress_bars
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    folder = tempfile.mkdtemp(dir=_folder())
    rows = Dataset.from_json(str(_pairs(num)), cache_dir=folder)
    args = SFTConfig(output_dir=folder, max_length=1024, use_cpu=True, report_to="none")
    return lambda: SFTTrainer(str(MODEL), args, train_dataset=rows)


# --- measuring


def peak_bytes() -> int:
    """The peak of this process's resident memory since ``forget_peak``."""
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


def forget_peak() -> int:
    """Begin a new peak; return the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def measure(name: str, size: int) -> None:
    """Measure a subject at one size in this process, and print the result as JSON."""
    measured = SUBJECTS[name].prepare(size)
    before, began = forget_peak(), time.process_time()
    measured()
    seconds = time.process_time() - began
    print(json.dumps({"CPU seconds": seconds, "peak MB": (peak_bytes() - before) / 1e6}))


def measured_apart(name: str, size: int) -> dict[str, float]:
    """Measure a subject at one size in another process."""
    with tempfile.TemporaryDirectory() as folder:
        code = f"import tempfile; tempfile.tempdir = {folder!r}; import growth; growth.measure({name!r}, {size})"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "benchmarks", capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} at {size}:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def exponent(sizes: tuple[int, ...], values: list[float], floor: float) -> str:
    """The slope on logarithmic axes; ``-`` if the largest value is below ``floor``."""
    if max(values) < floor:
        return "-"
    rise = math.log(max(values[-1], floor) / max(values[0], floor))
    return f"{rise / math.log(sizes[-1] / sizes[0]):.1f}"


def draw(results: Results, before: Results, path: Path) -> None:
    """Two small plots for each subject, CPU seconds and peak, on logarithmic axes; those of ``before`` dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 2.6 * -(-len(results) // 2)), layout="constrained")
    figure.suptitle("What grows with the size: before dashed, now solid; the number is the exponent")
    plots = [(name, unit) for name in results for unit in FLOORS]
    for axes, (name, unit) in zip(figure.subplots(-(-len(results) // 2), 4).flat, plots, strict=False):
        for label, style, measured in (("before", "o--", before.get(name)), ("now", "o-", results[name])):
            if measured:
                sizes, values = zip(*((size, max(each[unit], FLOORS[unit])) for size, each in measured), strict=True)
                slope = exponent(sizes, [each[unit] for _, each in measured], FLOORS[unit])
                axes.loglog(
                    sizes, values, style, color="#c44" if label == "before" else "#247", label=f"{label}, {slope}"
                )
        axes.set_title(f"{name.replace('_', ' ')}: {unit}", fontsize=10)
        axes.set_xlabel(SUBJECTS[name].unit)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    for axes in figure.axes[len(plots) :]:
        axes.set_visible(False)
    figure.savefig(path, dpi=70)


def line(name: str, measured: list[tuple[int, dict[str, float]]]) -> str:
    """A row of the table."""
    sizes = tuple(size for size, _ in measured)
    columns = [name.replace("_", " "), f"{', '.join(f'{size:,}' for size in sizes)} {SUBJECTS[name].unit}"]
    for unit, floor in FLOORS.items():
        values = [each[unit] for _, each in measured]
        columns += [", ".join(f"{value:{FORMS[unit]}}" for value in values), exponent(sizes, values, floor)]
    return f"| {' | '.join(columns)} |"


def main() -> None:
    """Print a table of all subjects, or of those named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *SUBJECTS], metavar="NAME", help=", ".join(SUBJECTS))
    parser.add_argument("--sizes", nargs=3, type=int, help="instead of a subject's own")
    parser.add_argument("--save", type=Path, help="write the figures as JSON")
    parser.add_argument("--before", type=Path, help="figures that --save wrote on an earlier commit")
    parser.add_argument("--picture", type=Path, help="draw the curves")
    args = parser.parse_args()
    has_trl = importlib.util.find_spec("trl") is not None
    results: Results = {}
    print("| subject | sizes | CPU seconds | exponent | peak MB | exponent |\n|---|---|---|---|---|---|")
    for name in args.names or SUBJECTS:
        if name.endswith("_of_trl") and not has_trl:
            continue
        sizes = args.sizes or SUBJECTS[name].sizes
        results[name] = [(size, measured_apart(name, size)) for size in sizes]
        print(line(name, results[name]), flush=True)
        if args.save:
            args.save.write_text(json.dumps(results, indent=1))
    if args.picture:
        draw(results, json.loads(args.before.read_text()) if args.before else {}, args.picture)


if __name__ == "__main__":
    main()
