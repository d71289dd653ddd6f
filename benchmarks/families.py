"""Train a tiny model of every family that the kit takes, and compare with what the family computes.

    python benchmarks/families.py                                     # all families, some half an hour on two cores
    python benchmarks/families.py llama gemma2 --topologies single    # some of them
    python benchmarks/families.py --write benchmarks/results/2026-11-23-families.md  # the table, between the marks

Each model has random weights and random persistent buffers, and lies in a folder of safetensors. The kit's own
functions open, check, load, train and save it, as recipes/finetune.py calls them, for one step in fp32. A cell is "ok"
if all of these hold, and else names the first that does not:

- the loss of the step is the one of the family's own ``model(labels=...)``, within ``TOLERANCE``, on padded rows;
- every trainable weight gets a gradient, or on one process it is said which do not ("said");
- in the family's own code, no token sees a later one;
- the proof of the loss head finds the losses of the model's own logits, and changes no tensor and no random state;
- ``final/``, opened by plain transformers or peft, gives the logits of the trained model.

A cell in brackets is a refusal in the kit's words, before the first step. Further columns: packing; by how much
loss and gradients change if a right-padded batch comes without its mask; and whether the kit computes the logits
("proven") or the family itself ("own logits"). The seconds of the proof are in the file of ``--json``. The training
loss contains the routers' auxiliary loss, where a family has one.
"""

import argparse
import json
import multiprocessing
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bitsandbytes
import numpy as np
import torch
import torch.nn.functional as F
from peft import PeftModel
from tiny_families import VOCABULARY, make_model
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from kit.config.recipe import Recipe
from kit.data.feed.batches import Collator, MicroBatch
from kit.data.feed.data_ranks import Ranks
from kit.data.feed.feed import GlobalBatch
from kit.data.samples.records import Table
from kit.export.final import replace_folder
from kit.model.build import build_meta_model, build_model, check_model, open_config
from kit.model.four_bit import four_bit_config
from kit.model.pretrained.classes import auto_class
from kit.strategy.accelerator import check_strategy, prepare, start
from kit.strategy.strategies import Strategy
from kit.strategy.topology import Topology
from kit.system.errors import Problem, UserError, raise_if
from kit.tasks.sft.loss import SupervisedLoss
from kit.train.checks.head_proof import prove_head
from kit.train.checks.isolation import check_isolation
from kit.train.optim.optim import build_optimizer
from kit.train.step import before_first_step, train_step

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-5  # of the loss, relative to 1 or its size
LOGIT_TOLERANCE = 1e-4  # of reloaded logits, relative to 1 or their size
SECONDS = 60  # for one cell
METHODS = ("full", "lora", "qlora")
TOPOLOGIES = {"single": 1, "fsdp2": 2}
LENGTHS = (24, 17, 9, 20)  # tokens of the samples
SAID = "said: "
NOT_SHIFTED = {"trocr"}  # families whose own loss expects labels that the caller has shifted


class Samples(Table):
    """The samples of one global batch, for the collator."""

    def __init__(self) -> None:
        lengths = np.array(LENGTHS)
        num_targets = lengths - lengths // 3
        records = {"length": lengths, "num_targets": num_targets, "target_weight": num_targets.astype(np.float64)}
        super().__init__(records, np.zeros(len(LENGTHS), np.int64))

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """The token ids and weights of sample ``i``."""
        ids = np.random.default_rng(i).integers(3, 100, LENGTHS[i])
        return ids, (np.arange(LENGTHS[i]) >= LENGTHS[i] // 3).astype(np.float32)


def global_batch(ranks: Ranks, packing: bool = False) -> GlobalBatch:
    """Return the batch of the only step: one micro-batch on each rank."""
    collator = Collator(len(LENGTHS) // ranks.count, pad_token_id=0, packing=packing, max_length=max(LENGTHS))
    items = [np.array([0, 1]), np.array([2, 3])] if packing else [np.array([i]) for i in range(len(LENGTHS))]
    batches = collator.micro_batches(Samples(), items, ranks)
    total = Samples().target_weights.sum(keepdims=True)
    return GlobalBatch(batches, total, total, np.array([sum(LENGTHS)]), 1.0, [])


def labels_of(batch: MicroBatch, family: str) -> torch.Tensor:
    """Return the labels [B, T] that the family expects: -100 where nothing is learned."""
    labels = torch.full_like(batch.input_ids, -100)
    labels.view(-1)[batch.target_positions + (family not in NOT_SHIFTED)] = batch.targets
    return labels


def reference(family: str, folder: Path) -> dict[str, Any]:
    """Return the family's own losses for each topology, and what the mask of padded rows changes."""
    make_model(family, folder)
    plain = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32).train()
    losses = {}
    for topology, world in TOPOLOGIES.items():
        batches = [global_batch(Ranks(rank, world)).micro_batches[0] for rank in range(world)]
        weights = torch.tensor([len(batch.targets) for batch in batches], dtype=torch.float64)
        own = [
            plain(
                input_ids=b.input_ids, attention_mask=b.attention_mask, labels=labels_of(b, family), use_cache=False
            ).loss
            for b in batches
        ]
        losses[topology] = float((torch.stack(own).detach().double() * weights).sum() / weights.sum())
    batch = global_batch(Ranks()).micro_batches[0]
    with torch.no_grad():
        ids = batch.input_ids[:1].clone()
        before = plain.eval()(input_ids=ids, use_cache=False).logits[:, :-1]
        ids[:, -1] += 1
        sees_later = not torch.allclose(before, plain(input_ids=ids, use_cache=False).logits[:, :-1], atol=1e-5)
    plain.train()
    results = []
    for mask in (batch.attention_mask, None):
        plain.zero_grad()
        logits = plain(input_ids=batch.input_ids, attention_mask=mask, use_cache=False).logits.flatten(0, 1)
        loss = F.cross_entropy(logits[batch.target_positions].float(), batch.targets)
        loss.backward()
        results.append((loss.item(), [p.grad.clone() for p in plain.parameters() if p.grad is not None]))
    (loss, gradients), (bare_loss, bare_gradients) = results
    largest = max(float(g.abs().max()) for g in gradients)
    pairs = zip(gradients, bare_gradients, strict=True)
    changes = [abs(loss - bare_loss), max(float((a - b).abs().max()) for a, b in pairs) / largest]
    buffers = [name for name, _ in plain.named_buffers() if name in plain.state_dict()]
    return {"loss": losses, "without_mask": changes, "buffers": len(buffers), "sees_later": sees_later}


def step(folder: Path, method: str, topology: str, packing: bool, known: dict[str, Any]) -> dict[str, Any]:
    """Open, check, load, train and save as the script does. Returns what is wrong, if anything is, and what is said.

    The trained model's logits are left beside ``final/``.
    """
    world = TOPOLOGIES[topology]
    asked = Topology(
        strategy=Strategy(topology),  # type: ignore[arg-type]
        config_name=topology,
        num_processes=world,
        mixed_precision="no",
        device_type="cpu",
        cpu_dry_run=True,
        load_on_rank0=topology == "fsdp2",
    )
    recipe = Recipe(
        model_name_or_path=str(folder),
        dataset="none.jsonl",
        method=method,
        packing=packing,
        max_length=48,
        global_batch_size=2 if packing else len(LENGTHS),
        optim="adamw_torch",
    )
    config = open_config(recipe)
    meta_model = build_meta_model(recipe, config, packing)
    problems = check_model(recipe, config, meta_model, max_length=recipe.max_length, packing=packing)
    raise_if([*problems, *check_strategy(asked, meta_model)])
    accelerator, plan = start(recipe, asked)
    torch.set_num_threads(1)
    model = build_model(recipe, config, plan, packing=packing, seed=recipe.seed)
    four_bit = any(isinstance(p, bitsandbytes.nn.Params4bit) for p in model.parameters())
    own_logits = model.get_base_model().uses_own_logits if method != "full" else model.uses_own_logits
    prepared = prepare(accelerator, asked, model, build_optimizer(model, recipe, recipe.peak_learning_rate))
    if packing:
        check_isolation(prepared, VOCABULARY, 64)
    before = _state(prepared)
    began = time.perf_counter()
    not_proven = prove_head(prepared, VOCABULARY)
    seconds = time.perf_counter() - began
    changed = _state(prepared) != before
    batch = global_batch(prepared.ranks, packing)
    before_first_step(prepared, batch)
    expected = known["loss"][topology]
    if method == "qlora":  # nobody but the loaded model knows what 4-bit weights compute
        expected = _own_loss(prepared, batch, config.model_type)
    without: list[str] = []

    def count() -> None:
        without.extend(n for n, p in prepared.model.named_parameters() if p.requires_grad and p.grad is None)

    result = train_step(prepared, SupervisedLoss(["tiny"]), batch, 1e-2, 1.0, before_update=count)
    rank0 = accelerator.is_main_process
    replace_folder(folder / "final", prepared, AutoTokenizer.from_pretrained(folder), "", config.dtype)
    prepared.model.eval()
    with torch.no_grad():
        logits = prepared.model(**_inputs(), use_cache=False).logits
    if rank0:
        torch.save(logits, folder / "logits.pt")
    difference = abs(result.loss - expected)
    wrong = ["tokens see later ones"] if known["sees_later"] else []
    wrong += ["the proof changes tensors or random state"] if changed else []
    wrong += not_proven
    if method == "qlora" and not four_bit:
        wrong.append("no weight is 4-bit")
    if not difference <= TOLERANCE * max(1, abs(expected)):
        wrong.append(f"loss differs by {difference:.2g}")
    said = f"no gradient reaches {_short(', '.join(without))}" if without else ""
    head = "own logits" if own_logits else "proven"
    return {"wrong": wrong, "said": said, "head": head, "seconds": seconds}


def _state(prepared: Any) -> list[Any]:
    """A summary of the random state, the parameters and all buffers on this rank."""
    for module in prepared.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass, the outermost one stays gathered
    tensors = [*prepared.model.parameters(), *prepared.model.buffers()]
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    sums = [t.detach().flatten().view(torch.uint8).sum(dtype=torch.int64).item() for t in local if t.numel()]
    return [*sums, torch.get_rng_state().tolist(), prepared.model.training]


def _own_loss(prepared: Any, batch: GlobalBatch, family: str) -> float:
    micro_batch = batch.micro_batches[0]
    inputs = {"input_ids": micro_batch.input_ids, "attention_mask": micro_batch.attention_mask}
    loss = prepared.model(**inputs, labels=labels_of(micro_batch, family), use_cache=False).loss.detach().double()
    weight = torch.tensor(float(len(micro_batch.targets)), dtype=torch.float64)
    sums = prepared.ranks.sum(torch.stack([loss * weight, weight]))
    return float(sums[0] / sums[1])


def _inputs() -> dict[str, torch.Tensor]:
    batch = global_batch(Ranks()).micro_batches[0]
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}


def reload(folder: Path, method: str) -> dict[str, Any]:
    """Open ``final/`` in plain transformers or peft, and compare its logits. Returns what is wrong."""
    expected = torch.load(folder / "logits.pt")
    config = AutoConfig.from_pretrained(folder)
    loader = auto_class(config)
    if method == "full":
        model = loader.from_pretrained(folder / "final", dtype=torch.float32)
    else:
        options: dict[str, Any] = {}
        if method == "qlora":  # in the same 4 bits: which modules have them is not part of an adapter
            with torch.device("meta"):
                meta_model = loader.from_config(config)
            options["quantization_config"] = four_bit_config(torch.float32, meta_model)
        base = loader.from_pretrained(folder, dtype=torch.float32, **options)
        for module in base.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        model = PeftModel.from_pretrained(base, str(folder / "final"))
    with torch.no_grad():
        logits = model.eval()(**_inputs(), use_cache=False).logits
    shown = _inputs()["attention_mask"].bool()
    difference = float((logits - expected)[shown].abs().max())
    if not difference <= LOGIT_TOLERANCE * max(1.0, float(expected[shown].abs().max())):
        return {"wrong": [f"final/ reloaded: logits differ by {difference:.2g}"]}
    return {"wrong": []}


# --- one process for each cell, so that a crash or a hang ends nothing but the cell

_forked = multiprocessing.get_context("fork")


def in_processes(
    function: Callable[..., dict[str, Any]], *args: Any, world: int = 1, seconds: int = SECONDS
) -> dict[str, Any]:
    """Call ``function`` in ``world`` new processes. Returns what rank 0 returns, or ``refused`` or ``wrong``."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
        probe.close()
        log, answer = Path(folder) / "log", Path(folder) / "answer"
        ranks = [
            _forked.Process(target=_rank, args=(r, world, port, log, answer, function, args)) for r in range(world)
        ]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + seconds
        for rank in ranks:
            rank.join(max(0.1, deadline - time.monotonic()))
        hangs = any(rank.is_alive() for rank in ranks)
        for rank in ranks:
            rank.kill()
            rank.join()
        if answer.exists():
            return json.loads(answer.read_text())
        lines = [
            line for line in log.read_text(errors="replace").splitlines() if re.match(r"\S*(Error|Exception)", line)
        ]
        last = lines[-1] if lines else "no output"
        return {"wrong": [f"no end within {seconds} s" if hangs else f"traceback: {_short(last, 120)}"]}


def _rank(rank: int, world: int, port: int, log: Path, answer: Path, function: Any, args: tuple[Any, ...]) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    if world > 1:
        values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in values.items()} | {"MASTER_ADDR": "localhost"}
    try:
        found = function(*args)
    except UserError as error:
        found = {"refused": "; ".join(_words(problem) for problem in error.problems)}
    if rank == 0:
        partial = answer.with_suffix(".partial")
        partial.write_text(json.dumps(found))
        partial.rename(answer)


def _words(problem: Problem) -> str:
    text = re.sub(r"/\S*/", "", f"{problem.where}: {problem.found}")
    text = re.sub(r"family-(\S+)-\w{8} ", r"\1 ", text)  # the folder's name
    return f"{text} -> {problem.fix}" if problem.fix else text


def _short(text: str, length: int = 70) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def row(family: str, topologies: list[str], methods: list[str]) -> dict[str, str]:
    """Fill one row of the table. Packing is tried with all weights on one process."""
    cells = {"family": family}
    folder = Path(tempfile.mkdtemp(prefix=f"family-{family}-"))
    try:
        known = in_processes(reference, family, folder)
        if "wrong" in known:
            return cells | {"model": "not made: " + known["wrong"][0]}
        cells["buffers"] = str(known["buffers"] or "")
        changes = known["without_mask"]
        cells["without mask"] = "same" if max(changes) <= 1e-5 else f"{changes[0]:.0e}, {changes[1]:.0e}"
        runs = [(method, topology, False) for topology in topologies for method in methods]
        runs += [("full", "single", True)] if "single" in topologies else []
        for method, topology, packing in runs:
            found = in_processes(step, folder, method, topology, packing, known, world=TOPOLOGIES[topology])
            if "refused" not in found and not any("traceback" in w for w in found["wrong"]) and not packing:
                found["wrong"] += in_processes(reload, folder, method)["wrong"]
            if "head" in found and (method, topology, packing) == ("full", "single", False):
                cells |= {"head": found["head"], "seconds": f"{found['seconds']:.2f}"}
            column = "packing" if packing else f"{method}, {topology}"
            fine = SAID + found["said"] if found.get("said") else "ok"
            cells[column] = f"({found['refused']})" if "refused" in found else "; ".join(found["wrong"]) or fine
            shutil.rmtree(folder / "final", ignore_errors=True)
        return cells
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types; without: all")
    parser.add_argument("--topologies", nargs="*", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--json", type=Path, help="keep the rows here; rows that are there are not computed again")
    parser.add_argument("--write", type=Path, help="write the table between the marks of this page")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the children are forks
    kept = options.json and options.json.exists()
    rows = {r["family"]: r for r in json.loads(options.json.read_text())} if kept else {}
    families = options.families or sorted(
        {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    )
    for i, family in enumerate(families):
        if family in rows and not options.families:
            continue
        began = time.monotonic()
        rows[family] = row(family, options.topologies, options.methods)
        bad = [
            f"{k}: {v}"
            for k, v in rows[family].items()
            if k not in ("family", "buffers", "seconds", "head") and v not in ("ok", "same")
        ]
        print(
            f"{i + 1}/{len(families)} {family} {time.monotonic() - began:.0f} s  {' | '.join(bad) or 'ok'}", flush=True
        )
        if options.json:
            options.json.write_text(json.dumps(list(rows.values()), indent=1))
    text = table([rows[family] for family in families if family in rows])
    if options.write:
        write(options.write, text)
    else:
        print("\n" + text)


def table(rows: list[dict[str, str]]) -> str:
    """Return a Markdown table. Long words become notes below it, each once."""
    columns = list(dict.fromkeys(name for r in rows for name in r if name not in ("model", "seconds")))
    notes: dict[str, int] = {}

    def cell(text: str) -> str:
        if len(text) <= 14:
            return text
        number = notes.setdefault(text, len(notes) + 1)
        return f"{'refused' if text[0] == '(' else 'said' if text.startswith(SAID) else '**wrong**'} {number}"

    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    made = (r for r in rows if "model" not in r)
    lines += [f"| {r['family']} | " + " | ".join(cell(r.get(name, "")) for name in columns[1:]) + " |" for r in made]
    lines += ["", *(f"{number}. {text.removeprefix(SAID).strip('()')}" for text, number in notes.items())]
    absent = [f"- {r['family']}: {r['model']}" for r in rows if "model" in r]
    return "\n".join(lines + (["", "Not made:", "", *absent] if absent else []))


BEGIN, END = "<!-- table of benchmarks/families.py -->", "<!-- end of table -->"


def write(page: Path, text: str) -> None:
    """Put ``text`` between the marks of ``page``."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
