"""Objectives over preferences beside TRL's trainers: the same losses and gradients; seconds and memory of a step.

    pip install trl==1.16.0
    python benchmarks/preferences_against_trl.py parity --model FOLDER --dataset rows.jsonl --columns question,answer
    python benchmarks/preferences_against_trl.py speed --model FOLDER --dataset rows.jsonl --columns question,answer

The dataset is one file of JSON Lines with a prompt and a completion. The rejected answer of a pair, and each answer
with the label false, is the answer to the next row.

``parity`` computes one step of the kit (two micro-batches), and the loss of TRL's own trainer for the same token ids
(one batch), in float32 on the CPU, for full training and for adapters. The weights lie one step of gradient descent
beside those of the reference, so that no ratio is 1. A third side computes the equations of the papers from full logits
in float64, without padding. The table has for each two sides the relative difference of the loss, and the largest
difference of a gradient relative to the largest gradient.

What TRL computes otherwise on purpose is made equal, and said so beside the case:

- ORPO: TRL's cross-entropy counts the tokens of the prompts too. It is restricted to the answers here; the row
  "as TRL has it" compares TRL's own loss with the paper's odds ratio and a cross-entropy that counts them.
- KTO: TRL compares each prompt of a micro-batch with the answer before it. The kit's partners are set to these, and the
  global batch is one micro-batch of TRL.

``speed`` trains with DPO like ``against_trl.py``: alternating, each run in a new process, the first steps left out. The
reference is computed in each step, or with ``+precompute`` before the first step. The kit always does the latter with
full training, where TRL's default keeps a second model.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import against_trl
import numpy as np
import torch
import torch.nn.functional as F

SMOOTHING = 0.2  # of the cases that have one
DISTANCE = 0.002  # between the weights and those of the reference
Gradients = dict[str, torch.Tensor]  # by the name of the weight
Sequences = Sequence[tuple[list[int], int]]  # token ids, and how many of them are the prompt


@dataclass(frozen=True)
class Case:
    """An objective with its settings on both sides."""

    name: str
    flags: dict[str, Any]  # of the kit
    trainer: str = ""  # of TRL; empty: it has no such loss
    settings: dict[str, Any] = field(default_factory=dict)  # of the trainer
    note: str = ""


DPO = [
    Case("dpo, sigmoid", {}, "DPOTrainer", {"loss_type": ["sigmoid"]}),
    Case("dpo, sigmoid, label_smoothing", {"label_smoothing": SMOOTHING}, note="no such loss in TRL 1.16"),
    Case("dpo, ipo", {"dpo_loss": "ipo"}, "DPOTrainer", {"loss_type": ["ipo"]}),
    Case("dpo, hinge", {"dpo_loss": "hinge"}, "DPOTrainer", {"loss_type": ["hinge"]}),
    Case(
        "dpo, robust",
        {"dpo_loss": "robust", "label_smoothing": SMOOTHING},
        "DPOTrainer",
        {"loss_type": ["robust"], "label_smoothing": SMOOTHING},
    ),
    Case("dpo, sigmoid_norm", {"dpo_loss": "sigmoid_norm"}, "DPOTrainer", {"loss_type": ["sigmoid_norm"]}),
]
CASES = [
    *(replace(case, flags={"objective": "dpo", "beta": 0.1, **case.flags}) for case in DPO),
    Case("orpo", {"objective": "orpo", "beta": 0.1}, "AnswersOnly", note="TRL's cross-entropy restricted to answers"),
    Case(
        "simpo",
        {"objective": "simpo", "beta": 2.0, "simpo_gamma": 0.5},
        "CPOTrainer",
        {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.5},
    ),
    Case("cpo", {"objective": "cpo", "beta": 0.1, "cpo_alpha": 1.0}, "CPOTrainer", {"cpo_alpha": 1.0}),
    Case(
        "kto",
        {"objective": "kto", "beta": 0.1, "desirable_weight": 1.5},
        "KTOTrainer",
        {"desirable_weight": 1.5},
        note="the kit with TRL's partners",
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["parity", "speed"])
    parser.add_argument("--model", required=True, help="folder of a causal language model with its tokenizer")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--columns", default="prompt,completion", help="their names in the dataset")
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--out", type=Path, help="append the table to this file")
    parity = parser.add_argument_group("parity")
    parity.add_argument("--pairs", type=int, default=8, help="of the global batch, or answers with a label")
    parity.add_argument("--only", default="", help="cases whose name contains this")
    speed = parser.add_argument_group("speed")
    speed.add_argument("--cases", nargs="+", default=["full", "full+precompute", "lora", "lora+precompute"])
    speed.add_argument("--micro_batch", type=int, default=2, help="pairs")
    speed.add_argument("--global_batch_size", type=int, default=8, help="pairs")
    speed.add_argument("--steps", type=int, default=15)
    speed.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = parity_table(Path(folder), args) if args.what == "parity" else speed_table(Path(folder), args)
    print("\n".join(lines))
    if args.out:
        with args.out.open("a") as file:
            file.write("\n".join(lines) + "\n")


def rows_of(args: argparse.Namespace) -> list[dict[str, str]]:
    """The rows of the dataset as pairs."""
    prompt, completion = args.columns.split(",")
    rows = [json.loads(line) for line in Path(args.dataset).read_text().splitlines()]
    others = [*rows[1:], rows[0]]
    return [
        {"prompt": f"{row[prompt]}\n", "chosen": row[completion], "rejected": other[completion]}
        for row, other in zip(rows, others, strict=True)
    ]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Parity.


def parity_table(folder: Path, args: argparse.Namespace) -> list[str]:
    pairs = rows_of(args)[: 4 * args.pairs]  # more than needed: those that are too long are left out
    good = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in pairs[0::2]]
    bad = [{"prompt": row["prompt"], "completion": row["rejected"], "label": False} for row in pairs[1::2]]
    rated = [row for both in zip(good, bad, strict=True) for row in both]
    args.files = {"pairs": write(folder / "pairs.jsonl", pairs), "rated": write(folder / "rated.jsonl", rated)}
    args.rows = {"pairs": pairs, "rated": rated}
    lines = [
        *against_trl.title(),
        f"{against_trl.versions()}; float32, a global batch of {args.pairs}; `{' '.join(['python', *sys.argv])}`",
        "",
        "| objective | method | loss | kit and TRL: loss | gradients | kit and float64: loss | gradients "
        "| TRL and float64: loss | gradients | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    tokens: list[bool] = []
    for method in ("full", "lora"):
        for case in CASES:
            if args.only in case.name:
                lines += compare(case, method, folder, args, tokens)
    same = f"{sum(tokens)} of {len(tokens)} sequences"
    return [*lines, "", f"TRL's own tokenisation of the rows gives the same ids and the same prompts in {same}.", ""]


def compare(case: Case, method: str, folder: Path, args: argparse.Namespace, tokens: list[bool]) -> list[str]:
    """Return the row of the table for a case. Append to ``tokens`` whether TRL makes the same of each sequence."""
    kit = Kit(case, method, args)
    loss, gradients = kit.step()
    exact = Exact(kit)
    sides = [(loss, gradients), exact.step(case)]
    theirs = Theirs(kit, folder, args)
    if case.trainer:
        sides.append(theirs.step(case))
    differences = [difference(sides[0], sides[2]) if case.trainer else None, difference(sides[0], sides[1])]
    differences.append(difference(sides[2], sides[1]) if case.trainer else None)
    tokens += theirs.same_tokens
    note = f"{case.note}, z = {kit.metrics['kl']:.3f}" if "kl" in kit.metrics else case.note
    lines = [table_row(case.name, method, loss, differences, note)]
    if case.name == "orpo":
        own = theirs.step(replace(case, trainer="ORPOTrainer"))
        counted = exact.step(case, learns_prompts=True)
        note = "the paper's odds ratio, cross-entropy of prompts and answers"
        lines.append(table_row("orpo, as TRL has it", method, own[0], [None, None, difference(own, counted)], note))
    return lines


def difference(one: tuple[float, Gradients], other: tuple[float, Gradients]) -> tuple[float, float]:
    """The relative difference of two losses, and the largest one of a gradient relative to the largest gradient."""
    assert one[1].keys() == other[1].keys()
    largest = max(gradient.abs().max().item() for gradient in other[1].values())
    differs = max((one[1][name].double() - gradient).abs().max().item() for name, gradient in other[1].items())
    return abs(one[0] - other[0]) / abs(other[0]), differs / largest


def table_row(name: str, method: str, loss: float, differences: Sequence[tuple[float, float] | None], note: str) -> str:
    cells = [name, method, f"{loss:.6f}"]
    for each in differences:
        cells += [f"{value:.1e}" for value in each] if each else ["", ""]
    print(" | ".join([*cells, note]), file=sys.stderr, flush=True)
    return f"| {' | '.join([*cells, note])} |"


class Kit:
    """The kit's side: one step, as recipes/finetune.py makes it."""

    def __init__(self, case: Case, method: str, args: argparse.Namespace) -> None:
        from kit.config.command_line import read_recipe
        from kit.data.feed.data_ranks import Ranks
        from kit.data.feed.feed import Feed
        from kit.data.open import pad_id
        from kit.model.build import build_model, open_config
        from kit.model.load_plan import LoadPlan
        from kit.preflight import preflight

        self.kind = "rated" if case.flags["objective"] == "kto" else "pairs"
        flags = {
            "model_name_or_path": args.model,
            "dataset": args.files[self.kind],
            "eval_dataset": "null",
            "method": method,
            "lora_dropout": 0,
            "max_length": args.max_length,
            "global_batch_size": args.pairs,
            "per_device_train_batch_size": args.pairs // 2,
            "shuffle": "false",
            "max_steps": 1,
            **case.flags,
        }
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        checked = preflight.check(read_recipe(words))
        self.recipe, self.tokenizer, data = checked.recipe, checked.tokenizer, checked.data
        self.beta = self.recipe.reward_scale
        items = data.order.batch(0)
        self.sequences: Sequences = [
            (ids.tolist(), int(np.flatnonzero(weights[1:])[0]) + 1)
            for (i,) in items
            for ids, weights in data.train.sequences(int(i))
        ]
        self.labels = [not data.train.kind.is_bad(data.train, i, "") for (i,) in items]
        self.partners = np.roll(np.arange(len(items)), 1)  # TRL's: the answer before
        mismatched = data.mismatched(data.train)
        if mismatched is not None:
            mismatched.partners[: len(items)] = self.partners
        size = self.recipe.micro_batch_size
        feed = Feed(data.train, data.order, self.recipe, size, Ranks(), pad_id(self.tokenizer), 1, mismatched)
        batch = feed.take(0)
        plan = LoadPlan(compute_dtype="float32", device="cpu")
        self.model: Any = build_model(self.recipe, open_config(self.recipe), plan)
        if method == "full":  # as kit.train.precompute has it: by the weights from which the run begins
            batch = replace(
                batch,
                micro_batches=[self._with_references(each) for each in batch.micro_batches],
                mismatched=[self._with_references(each) for each in batch.mismatched],
            )
        self.batch = batch
        self.metrics: dict[str, float] = {}
        move(self.model, batch.micro_batches[0])

    def _with_references(self, micro_batch: Any) -> Any:
        from kit.train.reference import sequence_logps

        if self.recipe.declared.has_reference:
            with torch.no_grad():
                losses = self.model(**micro_batch.model_inputs())
            return micro_batch.with_per_sequence(references=sequence_logps(losses, micro_batch))
        return micro_batch

    def step(self) -> tuple[float, Gradients]:
        from kit.strategy.accelerator import prepare, start
        from kit.strategy.strategies import SINGLE
        from kit.strategy.topology import Topology
        from kit.tasks.objectives import build_objective
        from kit.train.step import train_step

        topology = Topology(
            strategy=SINGLE, config_name="single", num_processes=1, mixed_precision="no", device_type="cpu"
        )
        accelerator, _ = start(self.recipe, topology)
        optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.0)
        prepared = prepare(accelerator, topology, self.model, optimizer)
        gradients: Gradients = {}
        result = train_step(
            prepared,
            build_objective(self.recipe, ["pairs"]),
            self.batch,
            0.0,
            max_grad_norm=0,
            before_update=lambda: gradients.update(gradients_of(prepared.model)),
        )
        self.metrics = result.metrics
        return result.loss, gradients

    def plain_model(self) -> Any:
        """The model as transformers opens it, without adapters: the reference."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.recipe.model_name_or_path, dtype=torch.float32)


def move(model: Any, micro_batch: Any) -> None:
    """Move the weights that train by a step of gradient descent on the answers of ``micro_batch``."""
    model(**micro_batch.model_inputs()).mean().backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    norm = torch.stack([p.grad.norm() for p in trained]).norm()
    with torch.no_grad():
        for parameter in trained:
            parameter.sub_(parameter.grad, alpha=DISTANCE / norm.item())
    model.zero_grad()


def gradients_of(model: torch.nn.Module) -> Gradients:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    model.zero_grad(set_to_none=False)  # which the step checks
    return found


class Exact:
    """The equations of the papers, in float64, from full logits of one sequence at a time."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.reference = kit.plain_model().double()
        self.model = with_adapters(kit, kit.plain_model()).double()

    def step(self, case: Case, learns_prompts: bool = False) -> tuple[float, Gradients]:
        flags, labels = self.kit.recipe, torch.tensor(self.kit.labels)
        policy = [log_probabilities(self.model, ids) for ids, _ in self.kit.sequences]
        with torch.no_grad():
            known = [log_probabilities(self.reference, ids) for ids, _ in self.kit.sequences]
        starts = [num_prompt - 1 for _, num_prompt in self.kit.sequences]
        sums = torch.stack([each[start:].sum() for each, start in zip(policy, starts, strict=True)])
        reference = torch.stack([each[start:].sum() for each, start in zip(known, starts, strict=True)])
        lengths = torch.tensor([len(each[start:]) for each, start in zip(policy, starts, strict=True)])
        if flags.objective == "kto":
            losses = self._kto(sums - reference, labels)
        else:
            losses = pair_losses(flags, sums, sums - reference, lengths)
        loss = losses.mean()
        weight = {"orpo": 1.0, "cpo": flags.cpo_alpha}.get(flags.objective, 0.0)
        if weight:
            chosen = [
                each if learns_prompts else each[start:] for each, start in zip(policy[0::2], starts[0::2], strict=True)
            ]
            loss = loss - weight * torch.cat(chosen).mean()
        loss.backward()
        return loss.item(), gradients_of(self.model)

    def _kto(self, ratios: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        beta, flags = self.kit.beta, self.kit.recipe
        others = []
        with torch.no_grad():
            for (own, num_prompt), partner in zip(self.kit.sequences, self.kit.partners, strict=True):
                theirs, num_theirs = self.kit.sequences[partner]
                ids = (own[:num_prompt] + theirs[num_theirs:])[: flags.max_length]
                both = [log_probabilities(model, ids)[num_prompt - 1 :].sum() for model in (self.model, self.reference)]
                others.append(both[0] - both[1])
        z = torch.stack(others).mean().clamp(min=0)
        good = flags.desirable_weight * (1 - torch.sigmoid(beta * (ratios - z)))
        bad = flags.undesirable_weight * (1 - torch.sigmoid(beta * (z - ratios)))
        return torch.where(labels, good, bad)


def log_probabilities(model: Any, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Of each token but the first, float64 [T - 1]."""
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1] / temperature
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def pair_losses(flags: Any, sums: torch.Tensor, ratios: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The loss of each pair; its two answers follow one another in each argument."""
    beta, e = flags.reward_scale, flags.label_smoothing

    def gap(values: torch.Tensor) -> torch.Tensor:
        return values[0::2] - values[1::2]

    h, per_token = gap(ratios), gap(ratios / lengths)
    p = (sums / lengths).exp()
    if flags.objective == "orpo":
        return -beta * F.logsigmoid(gap((p / (1 - p)).log()))
    if flags.objective == "simpo":
        return -F.logsigmoid(beta * gap(sums / lengths) - flags.simpo_gamma)
    if flags.objective == "cpo":
        return -F.logsigmoid(beta * gap(sums))
    losses: dict[str, Callable[[], torch.Tensor]] = {
        "sigmoid": lambda: -(1 - e) * F.logsigmoid(beta * h) - e * F.logsigmoid(-beta * h),
        "robust": lambda: (-(1 - e) * F.logsigmoid(beta * h) + e * F.logsigmoid(-beta * h)) / (1 - 2 * e),
        "ipo": lambda: (per_token - 1 / (2 * beta)) ** 2,
        "hinge": lambda: (1 - beta * h).clamp(min=0),
        "sigmoid_norm": lambda: -F.logsigmoid(beta * per_token),
    }
    return losses[flags.dpo_loss]()


def with_adapters(kit: Kit, model: Any) -> Any:
    """Give ``model`` the weights of the kit's model, and its adapters."""
    from peft import get_peft_model

    if kit.recipe.method != "full":
        model = get_peft_model(model, kit.model.peft_config["default"])
    model.load_state_dict(kit.model.state_dict())
    return model


class Theirs:
    """TRL's side: its trainers' losses of the kit's token ids."""

    def __init__(self, kit: Kit, folder: Path, args: argparse.Namespace) -> None:
        self.kit, self.folder, self.args = kit, folder, args
        self.same_tokens: list[bool] = []  # whether TRL's own tokenisation of the same rows has each sequence too

    def step(self, case: Case) -> tuple[float, Gradients]:
        from datasets import Dataset, disable_progress_bars

        disable_progress_bars()
        trainer_class, config_class = trainer_and_config(case.trainer)
        kit, is_full = self.kit, self.kit.recipe.method == "full"
        if kit.tokenizer.pad_token is None:  # TRL's collators need one
            kit.tokenizer.pad_token = kit.tokenizer.eos_token
        options: dict[str, Any] = {}
        if is_full and kit.recipe.declared.has_reference:
            options["ref_model"] = kit.plain_model()
        if not is_full:
            options["peft_config"] = kit.model.peft_config["default"]
        args = config_class(
            output_dir=str(self.folder / "trl"),
            beta=kit.beta,
            max_length=self.args.max_length,
            per_device_train_batch_size=self.args.pairs,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            **case.settings,
        )
        trainer = trainer_class(
            model=kit.plain_model(),
            args=args,
            train_dataset=Dataset.from_list(self.args.rows[kit.kind]),
            processing_class=kit.tokenizer,
            **options,
        )
        trainer.model.load_state_dict(kit.model.state_dict())
        trainer.model.train()
        self._compare_tokens(trainer.train_dataset)
        loss = trainer.compute_loss(trainer.model, trainer.data_collator(self._examples(case)))
        loss.backward()
        return loss.item(), gradients_of(trainer.model)

    def _examples(self, case: Case) -> list[dict[str, Any]]:
        """The kit's token ids, as the collator of the trainer takes them."""
        halves = [(ids[:num_prompt], ids[num_prompt:]) for ids, num_prompt in self.kit.sequences]
        if self.kit.kind == "rated":
            return [
                {
                    "prompt_ids": prompt,
                    "completion_ids": answer,
                    "KL_completion_ids": halves[partner][1],
                    "label": label,
                }
                for (prompt, answer), partner, label in zip(halves, self.kit.partners, self.kit.labels, strict=True)
            ]
        pairs = list(zip(halves[0::2], halves[1::2], strict=True))
        if case.trainer == "DPOTrainer":
            return [
                {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
                for (prompt, chosen), (_, rejected) in pairs
            ]
        examples = []
        for pair in pairs:
            example: dict[str, Any] = {}
            for name, (prompt, answer) in zip(("chosen", "rejected"), pair, strict=True):
                example |= {
                    f"{name}_input_ids": prompt + answer,
                    f"{name}_attention_mask": [1] * len(prompt + answer),
                    f"{name}_labels": [-100] * len(prompt) + answer,
                }
            examples.append(example)
        return examples

    def _compare_tokens(self, dataset: Any) -> None:
        """Look for the kit's sequences among those that TRL made of the same rows."""
        if "prompt_ids" in dataset.column_names:
            names = [name for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in dataset.column_names]
            own = [(row["prompt_ids"], row[name]) for row in dataset for name in names]
        else:
            own = []
            for row in dataset:
                for name in ("chosen", "rejected"):
                    num_prompt = row[f"{name}_labels"].count(-100)
                    ids = row[f"{name}_input_ids"]
                    own.append((ids[:num_prompt], ids[num_prompt:]))
        found = {(tuple(prompt), tuple(answer)) for prompt, answer in own}
        self.same_tokens = [(tuple(ids[:num]), tuple(ids[num:])) in found for ids, num in self.kit.sequences]


def trainer_and_config(name: str) -> tuple[Any, Any]:
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    class AnswersOnly(ORPOTrainer):  # type: ignore[misc]
        """Counts no tokens of prompts in the cross-entropy."""

        def concatenated_forward(self, model: Any, batch: Any) -> Any:
            *others, chosen_logits, rejected_logits, _ = super().concatenated_forward(model, batch)
            labels = batch["chosen_labels"][:, 1:]
            logits = chosen_logits[:, : labels.shape[1]]  # the rejected answers may be longer
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            return *others, chosen_logits, rejected_logits, loss

    return {
        "DPOTrainer": (DPOTrainer, DPOConfig),
        "KTOTrainer": (KTOTrainer, KTOConfig),
        "CPOTrainer": (CPOTrainer, CPOConfig),
        "ORPOTrainer": (ORPOTrainer, ORPOConfig),
        "AnswersOnly": (AnswersOnly, ORPOConfig),
    }[name]


# Speed.


def speed_table(folder: Path, args: argparse.Namespace) -> list[str]:
    args.data = write(folder / "pairs.jsonl", pairs_that_fit(args))
    lines = against_trl.header(args)
    for case in args.cases:
        precompute = "true" if "+precompute" in case else "false"
        more = {"objective": "dpo", "beta": 0.1, "eval_dataset": "null", "predict_with_generate": "false"}
        lines.append(against_trl.row(case, args, __file__, precompute_reference=precompute, **more))
    return [*lines, ""]


def pairs_that_fit(args: argparse.Namespace) -> list[dict[str, str]]:
    """As many pairs as the steps need, of at most ``max_length`` tokens: the two sides cut longer ones differently."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def fits(row: dict[str, str]) -> bool:
        return all(
            len(tokenizer(row["prompt"] + row[half]).input_ids) < args.max_length  # one is left for the end of the text
            for half in ("chosen", "rejected")
        )

    return list(islice(filter(fits, rows_of(args)), args.steps * args.global_batch_size))


def train_with_trl(folder: str, args: argparse.Namespace) -> None:
    """TRL's side, in a process of its own."""
    from datasets import load_dataset
    from trl import DPOConfig, DPOTrainer

    precompute = "+precompute" in args.case
    config = DPOConfig(precompute_ref_log_probs=precompute, **against_trl.settings_of_trl(folder, args))
    data = load_dataset("json", data_files=args.data, split="train")
    against_trl.train(folder, args, DPOTrainer, config, data)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl"]:
        train_with_trl(sys.argv[2], argparse.Namespace(**json.loads(sys.argv[3])))
    else:
        main()
