"""Steps on rows with images beside TRL's SFTTrainer: processor seconds, and losses.

    pip install trl==1.16.0
    python benchmarks/images_against_trl.py

Both sides train the same tiny Qwen2-VL in float32 by one thread, on the same rows in the same micro-batches. The vision
tower is frozen, and prompts are masked. TRL gets the processor of transformers without its part for videos, which needs
torchvision. Each run is a process of its own; sides alternate, and the first steps are left out. A step has all that it
costs the process: decoding and resizing of images, collating, the update. Losses are compared step by step: where they
differ by more than 1 %, the sides did not do the same work, and the table says so.
"""

import argparse
import base64
import itertools
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import against_trl
import torch

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "recipes/tiny-vision"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(TINY / "model"), help="folder of a Qwen2-VL or Qwen2.5-VL")
    parser.add_argument("--dataset", default=str(TINY / "train.jsonl"), help="JSON Lines as those of tiny-vision")
    parser.add_argument("--max_length", type=int, default=128)
    parser.add_argument("--micro_batch", type=int, default=16)
    parser.add_argument("--global_batch_size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rounds = [[run_side(side, args) for side in ("trl", "kit")] for _ in range(args.rounds)]
    seconds = [[statistics.mean(side["seconds"]) for side in each] for each in rounds]
    ratios = [own / theirs for theirs, own in seconds]
    losses = [pair for theirs, own in rounds for pair in zip(theirs["losses"], own["losses"], strict=True)]
    differs = max(abs(a - b) / abs(b) for a, b in losses)
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    cells = [*(f"{statistics.median(side):.3f}" for side in zip(*seconds, strict=True))]
    cells += [ratio if differs <= 0.01 else f"not the same work ({ratio})", f"{differs:.1e}"]
    print(
        *against_trl.title(),
        f"{against_trl.versions()}; `{' '.join(['python', *sys.argv])}`",
        "",
        "| CPU seconds of a step: TRL | the kit | the kit's over TRL's (range of rounds) | difference of a loss |",
        "|---|---|---|---|",
        f"| {' | '.join(cells)} |",
        sep="\n",
    )


def run_side(side: str, args: argparse.Namespace) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        against_trl.run([__file__, f"--{side}", folder, json.dumps(vars(args))])
        found = json.loads(Path(folder, "result.json").read_text())
    print(side, statistics.mean(found["seconds"]), found["losses"][:3], file=sys.stderr, flush=True)
    return found


def write(folder: str, ends: list[float], losses: list[float]) -> None:
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    result = {"seconds": seconds[against_trl.WARM_UP_STEPS - 1 :], "losses": losses}
    Path(folder, "result.json").write_text(json.dumps(result))


def train_with_trl(folder: str, args: argparse.Namespace) -> None:
    from datasets import Dataset, Features, Image, List, Value
    from transformers import (
        AutoImageProcessor,
        AutoModelForImageTextToText,
        AutoTokenizer,
        Qwen2VLProcessor,
        TrainerCallback,
    )
    from trl import SFTConfig, SFTTrainer

    class Stills(Qwen2VLProcessor):  # type: ignore[misc]
        def check_argument_for_proper_class(self, *_: Any) -> None:
            """Imports what videos need."""

    rows = []
    for line in Path(args.dataset).read_text().splitlines():
        (image, text), answer = (message["content"] for message in json.loads(line)["messages"])
        of_image = {"bytes": base64.b64decode(image["image_url"]["url"].split(",")[1]), "path": None}
        prompt = [{"role": "user", "content": text["text"]}]
        completion = [{"role": "assistant", "content": answer}]
        rows.append({"images": [of_image], "prompt": prompt, "completion": completion})
    message = List({"role": Value("string"), "content": Value("string")})
    features = Features({"images": List(Image()), "prompt": message, "completion": message})
    model: Any = AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.float32)
    model.model.visual.requires_grad_(False)
    tokenizer, of_images = AutoTokenizer.from_pretrained(args.model), AutoImageProcessor.from_pretrained(args.model)
    ends = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.process_time())

    settings = against_trl.settings_of_trl(folder, args)
    del settings["model_init_kwargs"]
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**settings, completion_only_loss=True),
        train_dataset=Dataset.from_list(rows, features=features),
        processing_class=Stills(of_images, tokenizer, of_images, chat_template=tokenizer.chat_template),
        callbacks=[Clock()],
    )
    trainer.train()
    write(folder, ends, [each["loss"] for each in trainer.state.log_history if "loss" in each])


def train_with_the_kit(folder: str, args: argparse.Namespace) -> None:
    import kit.train.step

    step, ends = kit.train.step.train_step, []

    def metered(*given: Any, **more: Any) -> Any:
        result = step(*given, **more)
        ends.append(time.process_time())
        return result

    kit.train.step.train_step = metered
    flags = {
        "model_name_or_path": args.model,
        "dataset": args.dataset,
        "eval_dataset": "null",
        "method": "full",
        "max_length": args.max_length,
        "per_device_train_batch_size": args.micro_batch,
        "global_batch_size": args.global_batch_size,
        "max_steps": args.steps,
        "learning_rate": against_trl.LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0,
        "shuffle": "false",
        "save_steps": 0,
        "output_dir": f"{folder}/run",
    }
    sys.argv = ["finetune.py", *(word for key, value in flags.items() for word in (f"--{key}", str(value)))]
    runpy.run_path(str(ROOT / "recipes/finetune.py"), run_name="__main__")
    lines = map(json.loads, Path(folder, "run/metrics.jsonl").read_text().splitlines())
    write(folder, ends, [each["loss"] for each in lines if "loss" in each])


if __name__ == "__main__":
    sides = {"--trl": train_with_trl, "--kit": train_with_the_kit}
    if sys.argv[1:2] and sys.argv[1] in sides:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
        torch.set_num_threads(1)
        sides[sys.argv[1]](sys.argv[2], argparse.Namespace(**json.loads(sys.argv[3])))
    else:
        main()
