"""Train tiny models of every class of images and text, and compare with what the family's own code computes.

    python benchmarks/media_families.py                                   # all of them, about half an hour on two cores
    python benchmarks/media_families.py gemma3 llava                      # some of them
    python benchmarks/media_families.py --torchvision FOLDER              # those that need it, found in this folder
    python benchmarks/media_families.py --write benchmarks/results/PAGE   # the table, between the marks

The models are those of ``tiny_media.py``. A row of the reference is encoded by the family's own
``processor(text=..., images=...)`` and goes through the family's own ``model(labels=...)`` alone. The kit opens, checks
and encodes the same rows from a file, and its loss and gradients of all rows are compared in float32:

- ids: the token ids of every row are the processor's;
- alone: rows one by one, with images and without any;
- padded: several rows in a micro-batch, some with images;
- packed: all rows in one;
- trained: rows one by one, the encoder and the projector trained too.

The figure is the larger of two: the difference of the summed loss as a part of it, and the largest difference of a
gradient as a part of the largest gradient. A cell in brackets is a refusal in the kit's words.
"""

import argparse
import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

KEPT: list[Any] = []  # what lives as long as the process
SECONDS = 400  # for a family
BOUND = 1e-5
RULES = {
    "alone": {"per_device_train_batch_size": 1},
    "padded": {"per_device_train_batch_size": 4},
    "packed": {"packing": True, "per_device_train_batch_size": 1, "global_batch_size": 1},
    "trained": {"per_device_train_batch_size": 1, "train_only": ["vision", "projector", "language"]},
}
SIZES = [[(70, 50)], [], [(70, 50), (120, 60)], [], [(40, 90)], [(30, 30), (200, 60), (70, 50)]]


def load_torchvision(folder: Path) -> None:
    """Import a torchvision of another build of torch, such as that of the package registry beside a CPU build.

    Its compiled operators are missing. They are declared and have no code, which no image processor calls. To be called
    before transformers is imported.
    """
    import torch

    sys.path.insert(0, str(folder))
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    KEPT.append(library)
    import torchvision  # noqa: F401


def write_rows(folder: Path) -> Path:
    """Write conversations with images of random colours, some rows with none."""
    import numpy as np
    from PIL import Image

    rows = []
    for i, sizes in enumerate(SIZES):
        parts: list[dict[str, str]] = []
        for k, (width, height) in enumerate(sizes):
            rng = np.random.default_rng(100 * i + k)
            colours = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
            Image.fromarray(colours).save(folder / f"{i}-{k}.png")
            parts += [{"type": "image", "path": f"{i}-{k}.png"}, {"type": "text", "text": f"picture {k} "}]
        question = [*parts, {"type": "text", "text": f"what is number {i}?"}]
        answer = {"role": "assistant", "content": f"tea and {i} " * (1 + i % 3)}
        rows.append({"messages": [{"role": "user", "content": question}, answer]})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "train.jsonl"


def own_loss(model: Any, processor: Any, row: dict[str, Any], folder: Path) -> tuple[Any, list[int]]:
    """Return the sum of the losses of a row by the family's own processor and forward, and its token ids."""
    import torch
    from PIL import Image

    asked, answer = row["messages"]
    pictures = [Image.open(folder / part["path"]) for part in asked["content"] if part["type"] == "image"]
    parts = [{"type": "image"} if part["type"] == "image" else part for part in asked["content"]]
    messages = [{"role": "user", "content": parts}, answer]
    render = processor.tokenizer.apply_chat_template
    text, prompt = render(messages, tokenize=False), render(messages[:1], tokenize=False, add_generation_prompt=True)
    options = {"return_tensors": "pt", "add_special_tokens": False} | ({"images": pictures} if pictures else {})
    if hasattr(getattr(model, "model", None), "get_rope_index"):
        options |= {"return_mm_token_type_ids": True}  # some processors are to be asked for what their models need
    encode = processor if pictures or _takes_text(processor, text) else processor.tokenizer
    if encode is processor.tokenizer:
        options = {"return_tensors": "pt", "add_special_tokens": False}
    inputs, num_asked = encode(text=[text], **options), encode(text=[prompt], **options)["input_ids"].shape[1]
    inputs.pop("labels", None)
    labels = inputs["input_ids"].clone()
    labels[:, :num_asked] = -100
    of_tower = {name: value for name, value in inputs.items() if not _is_unknown(model, name)}
    of_tower = {k: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in of_tower.items()}
    loss = model(**of_tower, labels=labels, use_cache=False).loss
    return loss * (labels[:, 1:] != -100).sum(), inputs["input_ids"][0].tolist()


def _takes_text(processor: Any, text: str) -> bool:
    """Whether the processor encodes a text without an image."""
    try:
        processor(text=[text])
    except ValueError:
        return False
    return True


def _is_unknown(model: Any, name: str) -> bool:
    """Whether the model's forward has no such argument: some processors return what only they use."""
    from inspect import signature

    parameters = signature(model.forward).parameters
    return name not in parameters and not any(p.kind == p.VAR_KEYWORD for p in parameters.values())


def family_report(family: str, folder: Path, report: dict[str, Any]) -> None:
    """Fill the report of a family. Raises what the family's or the kit's code raises."""
    import tiny_media
    import transformers

    report["stage"] = "making"
    tiny_media.make_model(family, folder)
    processor = tiny_media.open_processor(folder)
    data = write_rows(folder)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    opened = tiny_media.model_class(transformers.AutoConfig.from_pretrained(folder))
    reference = opened.from_pretrained(folder).train()
    report["stage"] = "own"
    expected, own_ids = [], []
    for row in rows:
        loss, ids = own_loss(reference, processor, row, folder)
        loss.backward()
        expected.append(loss.item())
        own_ids.append(ids)
    seen = [n for n, p in reference.named_parameters() if re.search("vis|image", n) and p.grad is not None]
    if not any(reference.get_parameter(name).grad.abs().sum() for name in seen):
        raise AssertionError("the family's own loss does not depend on its encoder")
    report["stage"] = "kit"
    for rule, changes in RULES.items():
        report[rule] = _refused(_compared, folder, data, changes, reference, expected, own_ids, report)
        if "'projector' matches no parameter" in str(report[rule]):
            changes = changes | {"train_only": ["vision", "language"]}
            report[rule] = _refused(_compared, folder, data, changes, reference, expected, own_ids, report)
    report["stage"] = "done"


def _refused(function: Any, *args: Any) -> Any:
    """What the function returns, or the refusal or error in one line."""
    from kit.system.errors import UserError

    try:
        return function(*args)
    except UserError as error:
        return f"({' '.join(str(error.problems[0]).split())})"
    except Exception as error:
        last = [f"{f.filename.split('/')[-1]}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)][-3:]
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} at {' '.join(last)}"


def _compared(
    folder: Path,
    data: Path,
    changes: dict[str, Any],
    reference: Any,
    expected: list[float],
    own_ids: list[list[int]],
    report: dict[str, Any],
) -> Any:
    import torch

    from kit.config.recipe import Recipe
    from kit.data.feed.data_ranks import Ranks
    from kit.model.build import build_model
    from kit.model.load_plan import LoadPlan
    from kit.preflight import preflight

    settings = {"method": "full", "max_length": 2048, "global_batch_size": len(SIZES), "max_steps": 1} | changes
    recipe = Recipe(model_name_or_path=str(folder), dataset=str(data), output_dir="unused", **settings)
    checked = preflight.check(recipe)
    different = [i for i, ids in enumerate(own_ids) if checked.data.train[i][0].tolist() != ids]
    report["ids"] = "ok"
    if different:
        i = different[0]
        report["ids"] = f"row {i}: {checked.data.train[i][0].tolist()[:40]} in place of {own_ids[i][:40]}"
        return "other ids"
    plan = LoadPlan(compute_dtype="float32", device="cpu")
    model = build_model(checked.recipe, checked.config, plan, packing=checked.recipe.packing)
    batch = checked.data.open_feed(checked.recipe, Ranks(), 0, {}).take(0)
    losses = torch.cat([model(**each.model_inputs()) for each in batch.micro_batches])
    losses.sum().backward()
    worst = abs(losses.sum().item() - sum(expected)) / sum(expected)
    largest = max(p.grad.abs().max().item() for p in reference.parameters() if p.grad is not None)
    which = "loss"
    for name, parameter in model.named_parameters():
        own = reference.get_parameter(name).grad
        if not parameter.requires_grad or (own is None and parameter.grad is None):
            continue
        own, ours = (torch.zeros_like(parameter) if each is None else each for each in (own, parameter.grad))
        difference = (own - ours).abs().max().item() / largest
        if difference > worst:
            worst, which = difference, name
    return worst if worst < BOUND else f"{worst:.1e} ({which})"


def in_process(family: str, torchvision: Path | None, folder: Path) -> dict[str, Any]:
    """Report on a family in a process of its own, which is forked from this one."""
    read, write = os.pipe()
    if not (child := os.fork()):
        os.close(read)
        signal.alarm(SECONDS)
        report: dict[str, Any] = {"family": family}
        try:
            family_report(family, folder, report)
        except BaseException as error:
            last = [f"{f.filename.split('/')[-1]}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)][-3:]
            report["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]} at {' '.join(last)}"
        os.write(write, json.dumps(report).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"family": family, "error": f"not done after {SECONDS} s", "stage": "making"}


def main() -> None:
    """Run the families that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--torchvision", type=Path, help="folder with torchvision, and timm")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.torchvision:
        load_torchvision(args.torchvision)
    import tiny_media
    import torch

    torch.set_num_threads(1)
    families = args.families or tiny_media.families()
    reports = []
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["KIT_CACHE"] = f"{scratch}/cache"
        for family in families:
            if tiny_media.needs_torchvision(family) != bool(args.torchvision):
                continue
            folder = Path(scratch, family)
            folder.mkdir()
            began = time.perf_counter()
            report = {"error": why} if (why := tiny_media.OTHERS.get(family)) else in_process(family, None, folder)
            report |= {"family": family, "seconds": round(time.perf_counter() - began)}
            reports.append(report)
            print(json.dumps(report), flush=True)
            if args.json:
                args.json.write_text(json.dumps(reports, indent=1))


if __name__ == "__main__":
    main()
