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
- trained: rows one by one, the encoder and the projector trained too;
- proof, proof of packs: a run with its proofs before the first step, and that step, in one process;
- DDP, FSDP2: the same on two processes, whose micro-batches have images or not.

The figure is the larger of two: the difference of the summed loss as a part of it, and the largest difference of a
gradient as a part of the largest gradient; for a run, the difference of the gradient norm as a part of it.
"""

import argparse
import json
import logging
import os
import re
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


def own_loss(model: Any, processor: Any, row: dict[str, Any], folder: Path) -> tuple[Any, list[int], int]:
    """Return the sum of a row's losses by the family's own processor and forward, its token ids, and its targets."""
    import torch
    from PIL import Image

    asked, answer = row["messages"]
    pictures = [Image.open(folder / part["path"]) for part in asked["content"] if part["type"] == "image"]
    parts = [{"type": "image"} if part["type"] == "image" else part for part in asked["content"]]
    messages = [{"role": "user", "content": parts}, answer]
    render = processor.tokenizer.apply_chat_template
    text, prompt = render(messages, tokenize=False), render(messages[:1], tokenize=False, add_generation_prompt=True)
    options: dict[str, Any] = {"return_tensors": "pt", "add_special_tokens": False}
    encode = processor if pictures or _takes(processor, text) else processor.tokenizer
    if pictures:  # those of each row, as transformers' own apply_chat_template gives them, if the processor takes that
        options["images"] = [pictures] if _takes(processor, text, images=[pictures]) else pictures
    if encode is processor and hasattr(getattr(model, "model", None), "get_rope_index"):
        options["return_mm_token_type_ids"] = True  # some processors are to be asked for what their models need
    inputs, num_asked = encode(text=[text], **options), encode(text=[prompt], **options)["input_ids"].shape[1]
    inputs.pop("labels", None)
    labels = inputs["input_ids"].clone()
    labels[:, :num_asked] = -100
    of_tower = {name: value for name, value in inputs.items() if not _is_unknown(model, name)}
    of_tower = {k: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in of_tower.items()}
    loss = model(**of_tower, labels=labels, use_cache=False).loss
    number = int((labels[:, 1:] != -100).sum())
    return loss * number, inputs["input_ids"][0].tolist(), number


def _takes(processor: Any, text: str, **options: Any) -> bool:
    """Whether the processor encodes such a text: without an image, or with those of each row in a list."""
    try:
        processor(text=[text], return_tensors="pt", **options)
    except (ValueError, TypeError):
        return False
    return True


def _is_unknown(model: Any, name: str) -> bool:
    """Whether the model's forward has no such argument: some processors return what only they use."""
    from inspect import signature

    parameters = signature(model.forward).parameters
    return name not in parameters and not any(p.kind == p.VAR_KEYWORD for p in parameters.values())


def of_one_process(family: str, folder: Path) -> dict[str, Any]:
    """Make the model, compute with the family's own code, and compare the kit's loss and gradients in one process."""
    import tiny_media
    import torch
    import transformers

    stage = "not made"
    try:
        tiny_media.make_model(family, folder)
        processor = tiny_media.open_processor(folder)
        data = write_rows(folder)
        rows = [json.loads(line) for line in data.read_text().splitlines()]
        opened = tiny_media.model_class(transformers.AutoConfig.from_pretrained(folder))
        reference = opened.from_pretrained(folder).train()
        stage = "not made so that its own code runs"
        own = [own_loss(reference, processor, row, folder) for row in rows]
        loss: Any = sum(loss for loss, _, _ in own)
        loss.backward()
        gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
        if not any(g.abs().sum() for name, g in gradients.items() if re.search("vis|image", name)):
            return {"wrong": [f"{stage}: its loss does not depend on its encoder"]}
    except Exception as error:
        return {"wrong": [f"{stage}: {_one_line(error)}"]}
    report: dict[str, Any] = {}
    ids = [each for _, each, _ in own]
    for rule, changes in RULES.items():
        report[rule] = _refused(_compared, folder, data, changes, gradients, loss.item(), ids, report)
        if "'projector' matches no parameter" in str(report[rule]):
            changes = changes | {"train_only": ["vision", "language"]}
            report[rule] = _refused(_compared, folder, data, changes, gradients, loss.item(), ids, report)
    torch.save(gradients, folder / "own.pt")
    return report | {"loss": loss.item() / sum(number for _, _, number in own)}


def of_a_run(folder: Path, topology: str, packing: bool, own: float) -> dict[str, Any]:
    """Build the model as a run does, with its proofs, and take a step. Called on all ranks."""
    import torch

    from kit.config.recipe import Recipe
    from kit.preflight import preflight
    from kit.strategy.strategies import Strategy
    from kit.strategy.topology import Topology
    from kit.tasks.sft.loss import SupervisedLoss
    from kit.train.policy import build_policy
    from kit.train.session import Session
    from kit.train.step import before_first_step, train_step

    world = int(os.environ.get("WORLD_SIZE", "1"))
    asked = Topology(
        strategy=Strategy(topology),  # type: ignore[arg-type]
        config_name=topology,
        num_processes=world,
        mixed_precision="no",
        device_type="cpu",
        cpu_dry_run=True,
        load_on_rank0=topology == "fsdp2",
    )
    settings = {"global_batch_size": 1} if packing else {"global_batch_size": len(SIZES)}
    recipe = Recipe(
        model_name_or_path=str(folder),
        dataset=str(folder / "train.jsonl"),
        output_dir=str(folder / "out"),
        method="full",
        max_length=2048,
        max_steps=1,
        packing=packing,
        per_device_train_batch_size=1,
        optim="adamw_torch",
        **settings,
    )
    checked = preflight.check(recipe, asked)
    session = Session(checked.recipe, asked)
    torch.set_num_threads(1)
    policy = build_policy(session, checked.recipe, checked.config, checked.tokenizer, checked.data)
    batch = checked.data.open_feed(checked.recipe, policy.ranks, 0, {}).take(0)
    before_first_step(policy, batch)
    names = {name.removeprefix("module.") for name, p in policy.model.named_parameters() if p.requires_grad}
    gradients = torch.load(folder / "own.pt")
    norm = torch.stack([g.norm() for name, g in gradients.items() if name in names]).norm() / batch.target_weights.sum()
    result = train_step(policy, SupervisedLoss(["rows"]), batch, 1e-2, 0.0)
    worst = max(abs(result.loss - own) / own, abs(result.grad_norm - norm) / norm)
    return {"worst": float(worst)}


def _refused(function: Any, *args: Any) -> Any:
    """What the function returns, or the refusal or error in one line."""
    from kit.system.errors import UserError

    try:
        return function(*args)
    except UserError as error:
        return f"({' '.join(str(error.problems[0]).split())})"
    except Exception as error:
        return _one_line(error)


def _one_line(error: Exception) -> str:
    last = [f"{f.filename.split('/')[-1]}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)][-3:]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} at {' '.join(last)}"


def _compared(
    folder: Path,
    data: Path,
    changes: dict[str, Any],
    gradients: dict[str, Any],
    expected: float,
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
    worst = abs(losses.sum().item() - expected) / expected
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    which = "loss"
    for name, parameter in model.named_parameters():
        own = gradients.get(name)
        if not parameter.requires_grad or (own is None and parameter.grad is None):
            continue
        own, ours = (torch.zeros_like(parameter) if each is None else each for each in (own, parameter.grad))
        difference = (own - ours).abs().max().item() / largest
        if difference > worst:
            worst, which = difference, name
    return worst if worst < BOUND else f"{worst:.1e} ({which})"


RUNS = {
    "proof": ("single", False, 1),
    "proof of packs": ("single", True, 1),
    "DDP": ("ddp", False, 2),
    "FSDP2": ("fsdp2", False, 2),
}


def report(family: str, folder: Path, runs: list[str]) -> dict[str, Any]:
    """Report on a family, each part in processes of its own."""
    import tiny_media
    from families import in_processes

    if why := tiny_media.OTHERS.get(family):
        return {"wrong": f"not made: {why}"}
    found = in_processes(of_one_process, family, folder, seconds=SECONDS)
    if "loss" not in found:
        return {"wrong": found["wrong"][0]}
    for name in runs:
        topology, packing, world = RUNS[name]
        args = (folder, topology, packing, found["loss"])
        of_run = in_processes(of_a_run, *args, world=world, seconds=SECONDS)
        refused = f"({of_run['refused']})" if "refused" in of_run else ""
        found[name] = of_run["worst"] if "worst" in of_run else refused or "; ".join(of_run["wrong"])
    return found


def _short(text: str) -> str:
    """``text`` without the folders of paths."""
    return re.sub(r"/\S*/", "", text)


def table(reports: list[dict[str, Any]]) -> str:
    """Return a Markdown table. Long words become notes below it, each once."""
    columns = ["family", "ids", *RULES, *RUNS]
    notes: dict[str, int] = {}

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.0e}" if value < BOUND else f"**{value:.0e}**"
        text = _short(str(value or ""))
        if len(text) <= 4:
            return text
        number = notes.setdefault(text, len(notes) + 1)
        return f"{'refused' if text[0] == '(' else '**wrong**'} {number}"

    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += [
        "| " + " | ".join([r["family"], *(cell(r.get(c)) for c in columns[1:])]) + " |" for r in reports if "loss" in r
    ]
    lines += ["", *(f"{number}. {text.strip('()')}" for text, number in notes.items())]
    absent = [f"- {r['family']}: {_short(r['wrong'])}" for r in reports if "wrong" in r]
    return "\n".join(lines + (["", "Without figures:", "", *absent] if absent else []))


def main() -> None:
    """Run the families that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument(
        "--torchvision", type=Path, help="folder with torchvision and timm: the families that need them"
    )
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--json", type=Path, help="keep the reports here; those that are there are kept")
    parser.add_argument("--write", type=Path, help="write the table of the reports between the marks of this page")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if args.torchvision:
        load_torchvision(args.torchvision)
    import tiny_media
    import torch
    from families import write

    import kit.preflight.preflight
    import kit.train.policy  # noqa: F401

    torch.set_num_threads(1)
    kept = args.json and args.json.exists()
    reports = {each["family"]: each for each in json.loads(args.json.read_text())} if kept else {}
    for family in args.families or tiny_media.families():
        if tiny_media.needs_torchvision(family) != bool(args.torchvision) or (family in reports and not args.families):
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            os.environ["KIT_CACHE"] = f"{folder}/cache"
            reports[family] = {"family": family} | report(family, Path(folder), args.runs)
        reports[family]["seconds"] = round(time.perf_counter() - began)
        print(json.dumps(reports[family]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(list(reports.values()), indent=1))
    text = table(sorted(reports.values(), key=lambda each: str(each["family"])))
    if args.write:
        write(args.write, text)
    else:
        print(text)


if __name__ == "__main__":
    main()
