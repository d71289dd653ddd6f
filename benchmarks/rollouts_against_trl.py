"""Policy gradients over groups of answers beside TRL's trainers: the same losses, gradients and advantages.

    pip install trl==1.16.0
    python benchmarks/rollouts_against_trl.py
    python benchmarks/rollouts_against_trl.py --speed FOLDER --dataset rows.jsonl

Prompts, answers, rewards and the log-probabilities of the model that drew the answers and of the reference are fixed;
nothing is generated. The answers to a prompt have different lengths, one of each group was cut off, and the answers of
one group all have the same reward. Old and reference log-probabilities are the model's with noise, so that ratios lie
on both sides of both limits.

The kit's side is one step (micro-batches of 4 answers), from the rewards on. TRL's side is ``compute_loss`` of its own
trainer, of what the trainer itself makes of the answers (one batch): only generation, and the log-probabilities of the
old model and of the reference, are replaced. A third side computes the equations of the papers from full logits in
float64, without padding. All are in float32 on the CPU but for the last. The table has for each two sides the
difference of the loss, and the largest difference of a gradient relative to the largest gradient.

``--speed`` trains a model with both, alternating, each run in a new process, by one thread, and the first step left
out: processor seconds of a step with those of its child processes, and of the calls that generate. Prompts, their order
and the reward are the same, which is checked. Answers are sampled by each, so the table has their lengths.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import against_trl
import numpy as np
import psutil
import torch
from preferences_against_trl import Gradients, gradients_of, log_probabilities

from kit.config.settings.objective import ObjectiveSettings

ROOT = Path(__file__).resolve().parents[1]
GROUP = 4  # answers to a prompt
MICRO_BATCH = 4  # answers
MOST = 48  # tokens that an answer may have
SPEED_GROUP, SPEED_RATE = 8, 1e-6
NOISE = 0.2  # standard deviation of a token's log-probability, old and of the reference
LOW, HIGH = 0.2, 0.28  # epsilon and epsilon_high, unless a case has others
BETA = 0.1
SKIPPED = {"rloo", "gspo", "sapo"}  # TRL counts clipped answers, the kit their tokens; of sapo none


@dataclass(frozen=True)
class Case:
    """A loss with its settings on both sides."""

    kind: str  # ``policy_loss`` of the kit
    name: str = ""  # what is special
    flags: dict[str, Any] = field(default_factory=dict)  # of the kit
    settings: dict[str, Any] | None = field(default_factory=dict)  # of TRL; None: it has no such loss
    is_off: bool = True  # whether the model has moved since it drew the answers
    masks_cut: bool = False  # nothing is learned from answers that were cut off
    packing: bool = False  # of the kit
    temperature: float = 1.0  # of sampling
    rewards: int = 1  # how many; the second is the length of the answer
    paper: str = ""  # if the equations are to be others, or another reading of the paper
    note: str = ""


TRL: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01, "epsilon_high": 0.015},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1 + HIGH},
    "rloo": {"beta": 0.0},  # its default is not 0
    "sapo": {"loss_type": "sapo"},
}
GSPO = {"epsilon": 0.01, "epsilon_high": 0.015}
LOSSES = [Case(kind, flags=GSPO if kind == "gspo" else {}, settings=TRL[kind]) for kind in TRL]


def with_beta(case: Case) -> Case:
    flags = {**case.flags, "beta": BETA}
    settings = {**(case.settings or {}), "beta": BETA}
    if case.kind != "rloo":
        settings["use_bias_correction_kl"] = False
    return replace(case, name="beta", flags=flags, settings=settings)


CASES = [
    *LOSSES,
    *map(with_beta, LOSSES),
    *(replace(case, name="masked", masks_cut=True) for case in LOSSES),
    *(replace(case, name="first step", is_off=False) for case in LOSSES),
    *(replace(with_beta(case), name="beta, packed", packing=True) for case in LOSSES),
    *(
        Case("dapo", name=f"beta, {each}", flags={"beta": BETA, "kl_estimator": each}, settings=None, note="TRL has k3")
        for each in ("k2",)
    ),
]
SEQUENCE = {"importance_sampling_level": "sequence", **GSPO}
CASES += [
    *(replace(with_beta(case), name="temperature 0.7, beta", temperature=0.7) for case in LOSSES),
    *(Case(kind, "ratio of the sequence", SEQUENCE, {**TRL[kind], **SEQUENCE}) for kind in ("grpo", "dapo", "dr_grpo")),
    *(
        Case(kind, "scale batch", each, {**TRL[kind], **each})
        for kind in ("dapo",)
        for each in [{"scale_rewards": "batch"}]
    ),
    *(
        Case("dapo", "two rewards" + name, each, {**TRL["dapo"], **each}, rewards=2)
        for name, each in {"": {}, ", GDPO": {"multi_objective_aggregation": "normalize_then_sum"}}.items()
    ),
]
# Where TRL has another loss, or a paper may be read in another way.
CORRECTED = {**TRL["grpo"], "beta": BETA}
OTHERS = [
    Case("grpo", "beta, corrected", {"beta": BETA}, CORRECTED, paper="corrected", note="paper: as TRL"),
    Case(
        "grpo", "first step, beta, corrected", {"beta": BETA}, CORRECTED, False, paper="corrected", note="paper: as TRL"
    ),
    Case("cispo", "TRL's epsilon_high 0.28", settings={"loss_type": "cispo"}, note="TRL's limit is 0.28, not 1.28"),
    Case("dr_grpo", "TRL's own scale", settings={"loss_type": "dr_grpo"}, note="TRL's default divides by the std"),
    Case(
        "rloo",
        "first step, REINFORCE",
        settings=TRL["rloo"],
        is_off=False,
        paper="reinforce",
        note="section 3.3 without ratios: the same gradients, another number as the loss",
    ),
    Case("dapo", "each group by itself", settings=TRL["dapo"], paper="by_group", note="equation 8 by the letter"),
    Case("cispo", "each group by itself", settings=TRL["cispo"], paper="by_group", note="equation 4 by the letter"),
]


@dataclass(frozen=True)
class Drawn:
    """An answer, by nobody's model."""

    prompt: list[int]
    answer: list[int]
    ended: bool
    reward: float
    old: list[float]  # log-probability of each token of the answer
    reference: list[float]

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, help="append the tables to this file")
    speed = parser.add_argument_group("speed")
    speed.add_argument("--speed", metavar="FOLDER", help="the model, with its tokenizer")
    speed.add_argument("--dataset", help="JSON Lines with `messages`, or `question` and `answer`")
    speed.add_argument("--answers", type=int, default=64, help="of a step")
    speed.add_argument("--max_new_tokens", type=int, default=MOST)
    speed.add_argument("--max_length", type=int, default=512)
    speed.add_argument("--steps", type=int, default=6)
    speed.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.speed:
            lines = speed_table(Path(folder), args)
        else:
            lines = [*loss_table(Path(folder), args), *advantage_table(Path(folder), args)]
    print("\n".join(lines))
    if args.out:
        with args.out.open("a") as file:
            file.write("\n".join(lines) + "\n")


def loss_table(folder: Path, args: argparse.Namespace) -> list[str]:
    answers = draw(args.prompts)
    kits = {packing: Kit(packing, len(answers)) for packing in (False, True)}
    lengths = sorted(len(each.answer) for each in answers)
    lines = [
        *against_trl.title(),
        f"{against_trl.versions()}; float32; {args.prompts} prompts, {len(answers)} answers of {lengths[0]} to "
        f"{lengths[-1]} tokens; `{' '.join(['python', *sys.argv])}`",
        "",
        "| loss | | the kit's | TRL's | kit and TRL: loss | gradients | metrics | kit and paper: loss | gradients "
        "| TRL and paper: loss | gradients | clipped tokens: low, high | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in [*CASES, *OTHERS]:
        if args.only in f"{case.kind} {case.name}":
            lines.append(compare(case, draw(args.prompts, case.temperature), kits[case.packing], folder))
    return [*lines, ""]


def compare(case: Case, answers: Sequence[Drawn], kit: "Kit", folder: Path) -> str:
    own, metrics = kit.step(case, answers)
    exact = by_the_paper(case, answers)
    cells = [case.kind, case.name, f"{own[0]:.6f}"]
    if case.settings is None:
        cells += ["", "", "", "", *differences(own, exact), "", ""]
    else:
        theirs, their_metrics = Theirs(case, answers, folder).step()
        metric = (
            ""
            if case.kind in SKIPPED or SEQUENCE.items() <= case.flags.items()
            else f"{largest_difference(metrics, their_metrics):.1e}"
        )
        cells += [f"{theirs[0]:.6f}", *differences(own, theirs), metric]
        cells += [*differences(own, exact), *differences(theirs, exact)]
    cells.append(f"{metrics['clip_ratio/low']:.0%}, {metrics['clip_ratio/high']:.0%}")
    print(" | ".join([*cells, case.note]), file=sys.stderr, flush=True)
    return f"| {' | '.join([*cells, case.note])} |"


def differences(one: tuple[float, Gradients], other: tuple[float, Gradients]) -> list[str]:
    """The difference of two losses, and the largest one of a gradient relative to the largest gradient."""
    assert one[1].keys() == other[1].keys()
    largest = max(gradient.abs().max().item() for gradient in other[1].values())
    differs = max((one[1][name].double() - gradient).abs().max().item() for name, gradient in other[1].items())
    return [f"{abs(one[0] - other[0]):.1e}", f"{differs / largest:.1e}"]


def largest_difference(own: dict[str, float], theirs: dict[str, list[float]]) -> float:
    """Of the distance to the reference and the shares of clipped tokens, where both have them."""
    names = {"kl": "kl", "clip_ratio/low": "clip_ratio/low_mean", "clip_ratio/high": "clip_ratio/high_mean"}
    found = [abs(own[name] - theirs[other][-1]) for name, other in names.items() if name in own and other in theirs]
    if "cispo_clip_ratio" in theirs:
        found.append(abs(own["clip_ratio/high"] - theirs["cispo_clip_ratio"][-1]))
    return max(found)


# The answers.


def plain_model() -> Any:
    """The model as transformers opens it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ROOT / "recipes/tiny/model", dtype=torch.float32)


def tokenizer_of() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "recipes/tiny/model")


def draw(num_prompts: int, temperature: float = 1.0) -> list[Drawn]:
    """Return the answers, those to one prompt one after another."""
    tokenizer, draws = tokenizer_of(), np.random.default_rng(0)
    lines = (ROOT / "recipes/tiny/train.jsonl").read_text().splitlines()
    rows = [json.loads(line)["messages"] for line in lines[: num_prompts + GROUP]]
    model = plain_model().double()
    answers = []
    for i in range(num_prompts):
        text = tokenizer.apply_chat_template(rows[i][:1], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        rewards = np.full(GROUP, 0.5) if i == 2 else draws.uniform(0, 1, GROUP).round(2)
        for k in range(GROUP):
            ids = tokenizer(rows[i + k][1]["content"], add_special_tokens=False).input_ids[: MOST - 1]
            ended = k != 3
            ids = ids[: (len(ids), len(ids) * 3 // 4, 4 + i, len(ids) // 2)[k]] + [tokenizer.eos_token_id] * ended
            with torch.no_grad():
                logps = log_probabilities(model, prompt + ids, temperature)[len(prompt) - 1 :].numpy()
            old, reference = ((logps + draws.normal(0, NOISE, len(ids))).astype(np.float32).tolist() for _ in range(2))
            answers.append(Drawn(prompt, ids, ended, float(rewards[k]), old, reference))
    return answers


# The kit.


class Kit:
    """The kit's side: one step, as recipes/finetune.py makes it of answers that it has."""

    def __init__(self, packing: bool, num_answers: int) -> None:
        from kit.config.command_line import read_recipe
        from kit.model.build import build_model, open_config
        from kit.model.load_plan import LoadPlan
        from kit.preflight import preflight
        from kit.strategy.accelerator import prepare, start
        from kit.strategy.strategies import SINGLE
        from kit.strategy.topology import Topology

        flags = {
            "model_name_or_path": ROOT / "recipes/tiny/model",
            "dataset": ROOT / "recipes/tiny/train.jsonl",
            "eval_dataset": "null",
            "method": "full",
            "objective": "grpo",
            "rewards": "exact_match",
            "num_generations": GROUP,
            "max_length": 256,
            "max_new_tokens": MOST,
            "excess_length_strategy": "drop",
            "global_batch_size": num_answers,
            "per_device_train_batch_size": 1 if packing else MICRO_BATCH,
            "packing": str(packing).lower(),
            "max_steps": 1,
        }
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        checked = preflight.check(read_recipe(words))
        self.recipe, self.tokenizer = checked.recipe, checked.tokenizer
        plan = LoadPlan(compute_dtype="float32", device="cpu")
        model: Any = build_model(self.recipe, open_config(self.recipe), plan)
        topology = Topology(
            strategy=SINGLE, config_name="single", num_processes=1, mixed_precision="no", device_type="cpu"
        )
        accelerator, _ = start(self.recipe, topology)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        self.prepared = prepare(accelerator, topology, model, optimizer)

    def step(self, case: Case, answers: Sequence[Drawn]) -> tuple[tuple[float, Gradients], dict[str, float]]:
        from kit.tasks.grpo.loss import PolicyLoss
        from kit.train.step import train_step

        given: dict[str, Any] = {"epsilon": LOW, "epsilon_high": HIGH, "rollout_temperature": case.temperature}
        given |= {"rewards": ["exact_match"] * case.rewards, **case.flags}
        settings = ObjectiveSettings(objective="grpo", policy_loss=case.kind, **given)
        gradients: Gradients = {}
        result = train_step(
            self.prepared,
            PolicyLoss(["tiny"], settings),
            self._batch(case, answers, settings),
            0.0,
            max_grad_norm=0,
            before_update=lambda: gradients.update(gradients_of(self.prepared.model)),
        )
        return (result.loss, gradients), result.metrics

    def _batch(self, case: Case, answers: Sequence[Drawn], settings: ObjectiveSettings) -> Any:
        from kit.data.feed.batches import Collator
        from kit.data.feed.data_ranks import Ranks
        from kit.data.feed.feed import counted
        from kit.data.open import pad_id
        from kit.rollouts.advantages import add_advantages
        from kit.rollouts.trajectories import Segment, Trajectories, Trajectory

        own = [
            Trajectory(
                (0, 0, k),
                [Segment(each.prompt, 0.0), Segment(each.ids[len(each.prompt) :], 1.0)],
                each.ended,
                rewards_of(each, case),
                sum(rewards_of(each, case)),
            )
            for k, each in enumerate(answers)
        ]
        for one, each in zip(own, answers, strict=True):
            one.logps |= {"old_logps": each.old} if case.is_off else {}
            one.logps |= {"reference_logps": each.reference} if settings.beta else {}
        if case.masks_cut:
            for one in own:
                one.logps = one.logps if one.ended else {name: [] for name in one.logps}
        add_advantages([own[at : at + GROUP] for at in range(0, len(own), GROUP)], settings)
        recipe = self.recipe
        prompts: Any = SimpleNamespace(dataset_ids=np.zeros(1, np.int64), media_codec=None)
        samples = Trajectories(own, prompts, case.masks_cut)
        collator = Collator(recipe.micro_batch_size, pad_id(self.tokenizer), case.packing, recipe.max_length)
        return replace(
            counted(samples, np.arange(len(samples)), 1),
            micro_batches=samples.micro_batches(collator, Ranks()),
            most_targets=len(own) * MOST,
        )


def rewards_of(each: Drawn, case: Case) -> list[float]:
    return [each.reward, len(each.answer) / MOST][: case.rewards]


def of_the_kit(kind: str, rewards: Sequence[float]) -> list[float]:
    from kit.rollouts.advantages import advantages

    gains: list[float] = advantages(np.array(rewards).reshape(-1, GROUP), kind).ravel().tolist()
    return gains


# The papers.


def by_the_paper(case: Case, answers: Sequence[Drawn]) -> tuple[float, Gradients]:
    """The equations in float64, from full logits of one answer at a time."""
    model = plain_model().double()
    given = {"epsilon": LOW, "epsilon_high": HIGH, "beta": 0.0, "kl_estimator": "k3", **case.flags}
    low, high, beta = 1 - given["epsilon"], 1 + given["epsilon_high"], given["beta"]
    rewards = np.array([sum(rewards_of(each, case)) for each in answers])
    if case.kind == "rloo" and beta:
        rewards -= beta * np.array(
            [(sum(each.old) - sum(each.reference)) * (each.ended or not case.masks_cut) for each in answers]
        )
    gains = np.concatenate([gains_of(case.kind, rewards[at : at + GROUP]) for at in range(0, len(answers), GROUP)])
    if case.flags.get("scale_rewards") == "batch":
        gains *= np.repeat(rewards.reshape(-1, GROUP).std(1, ddof=1) + 1e-4, GROUP) / (rewards.std(ddof=1) + 1e-4)
    if "multi_objective_aggregation" in case.flags:
        of_each = np.array([rewards_of(each, case) for each in answers]).T  # [K, answers]
        gains = sum(
            np.concatenate([gains_of("grpo", own[at : at + GROUP]) for at in range(0, len(own), GROUP)])
            for own in of_each
        )
        gains = (gains - gains.mean()) / (gains.std(ddof=1) + 1e-4)
    groups: list[list[torch.Tensor]] = []  # of each answer the loss of each token
    for at in range(0, len(answers), GROUP):
        groups.append([])
        for each, gain in zip(answers[at : at + GROUP], gains[at : at + GROUP], strict=True):
            now = log_probabilities(model, each.ids, case.temperature)[len(each.prompt) - 1 :]
            old = torch.tensor(each.old, dtype=torch.float64) if case.is_off else now.detach()
            if case.paper == "reinforce":
                losses = (-gain * now.sum()).expand(len(now))
            else:
                is_sequence = "importance_sampling_level" in case.flags
                losses = token_losses("gspo" if is_sequence else case.kind, now, old, gain, low, high)
            if beta and case.kind != "rloo":
                d = torch.tensor(each.reference, dtype=torch.float64) - now
                kl = {"k2": d**2 / 2, "k3": d.exp() - d - 1}[given["kl_estimator"]]
                losses = losses + beta * kl * ((now - old).exp() if case.paper == "corrected" else 1)
            groups[-1].append(losses * (each.ended or not case.masks_cut))
    loss = torch.stack(list(means(case, groups, [each.ended or not case.masks_cut for each in answers]))).mean()
    loss.backward()
    return loss.item(), gradients_of(model)


def gains_of(kind: str, rewards: np.ndarray) -> list[float]:
    """Advantages of a group; the standard deviation is the unbiased one with a ten-thousandth, as on both sides."""
    if kind == "rloo":
        return [float(r - np.mean(np.delete(rewards, i))) for i, r in enumerate(rewards)]
    scale = 1.0 if kind == "dr_grpo" else np.std(rewards, ddof=1) + 1e-4
    return [float((r - np.mean(rewards)) / scale) for r in rewards]


def token_losses(kind: str, now: torch.Tensor, old: torch.Tensor, gain: float, low: float, high: float) -> torch.Tensor:
    if kind == "sapo":
        t = 1.0 if gain > 0 else 1.05
        return -torch.sigmoid(t * ((now - old).exp() - 1)) * 4 / t * gain
    if kind == "cispo":
        return -(now - old).exp().clamp(max=high).detach() * gain * now
    logs = {"gspo": lambda: (now - old).mean().expand(len(now)), "rloo": lambda: (now - old).sum().expand(len(now))}
    ratio = logs.get(kind, lambda: now - old)().exp()
    return -torch.minimum(ratio * gain, ratio.clamp(low, high) * gain)


def means(case: Case, groups: Sequence[Sequence[torch.Tensor]], learned: Sequence[bool]) -> Iterator[torch.Tensor]:
    """Numbers whose mean is the loss, from the loss of each token."""
    answers = [losses for group in groups for losses in group]
    if case.paper == "by_group":
        yield from (torch.cat(list(group)).mean() for group in groups)
    elif case.kind in ("dapo", "cispo"):
        yield torch.cat(answers).sum() / sum(len(each) for each, on in zip(answers, learned, strict=True) if on)
    elif case.kind == "dr_grpo":
        yield from (losses.sum() / MOST for losses in answers)
    else:
        yield from (losses.mean() for losses in answers)


# TRL.


class Theirs:
    """TRL's side: its trainer's loss of what it makes of the same answers."""

    def __init__(self, case: Case, answers: Sequence[Drawn], folder: Path) -> None:
        from datasets import Dataset, disable_progress_bars

        disable_progress_bars()
        self.case, self.answers = case, answers
        trainer_class, config_class = trainer_and_config("RLOOTrainer" if case.kind == "rloo" else "GRPOTrainer")
        given: dict[str, Any] = {"epsilon": LOW, "epsilon_high": HIGH, **(case.settings or {})}
        args = config_class(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=len(answers),
            num_generations=GROUP,
            num_iterations=2 if case.is_off else 1,
            max_completion_length=MOST,
            mask_truncated_completions=case.masks_cut,
            temperature=case.temperature,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            **given,
        )
        rows = [{"prompt": "", "number": i} for i in range(len(answers))]
        self.trainer = trainer_class(
            model=plain_model(),
            reward_funcs=[self._rewards, self._lengths][: case.rewards],
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer_of(),
        )
        self.trainer.answers, self.trainer.is_off = answers, case.is_off
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer.model.train()
        self.inputs = self.trainer._generate_and_score_completions(rows)

    def step(self) -> tuple[tuple[float, Gradients], dict[str, list[float]]]:
        loss = self.trainer.compute_loss(self.trainer.model, self.inputs)
        loss.backward()
        return (loss.item(), gradients_of(self.trainer.model)), self.trainer._metrics["train"]

    def _lengths(self, number: Sequence[int], **_: Any) -> list[float]:
        return [len(self.answers[i].answer) / MOST for i in number]

    def _rewards(self, number: Sequence[int], **_: Any) -> list[float | None]:
        rewards = [self.answers[i].reward for i in number]
        return [None if np.isnan(reward) else reward for reward in rewards]


def trainer_and_config(name: str) -> tuple[Any, Any]:
    import trl

    base: Any = getattr(trl, name)

    class Given(base):
        """Generates nothing, and is told what the old model and the reference would say."""

        def _generate(self, prompts: Any) -> Any:
            prompt_ids, ids = [each.prompt for each in self.answers], [each.answer for each in self.answers]
            texts = self.processing_class.batch_decode(ids, skip_special_tokens=True)
            if name == "RLOOTrainer":
                return prompt_ids, ids, texts
            return prompt_ids, ids, None, texts, None, {}, None, None

        def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() or (model is not self.ref_model and not self.is_off):
                return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            given = [each.reference if model is self.ref_model else each.old for each in self.answers]
            return torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, given)), batch_first=True), None, None

    return Given, getattr(trl, name.replace("Trainer", "Config"))


# Advantages.


def advantage_table(folder: Path, args: argparse.Namespace) -> list[str]:
    """Of the same rewards, one of which is missing."""
    answers = draw(args.prompts)
    answers[1] = replace(answers[1], reward=float("nan"))
    rewards = np.array([each.reward for each in answers])
    plain: dict[str, Callable[[np.ndarray], list[float]]] = {
        "grpo": lambda known: ((known - known.mean()) / max(known.std(), 1e-12)).tolist(),
        "dr_grpo": lambda known: gains_of("dr_grpo", known),
        "rloo": lambda known: gains_of("rloo", known),
    }
    lines = [
        "| advantages | largest | kit and TRL | kit and the paper's, 1e-4 and ddof 1 | kit and std of all (ddof 0) |",
        "|---|---|---|---|---|",
    ]
    for kind in ("grpo", "dr_grpo", "rloo"):
        own = np.array(of_the_kit(kind, rewards.tolist()))
        theirs = Theirs(Case(kind, settings=TRL[kind]), answers, folder).inputs["advantages"].double().numpy()
        papers = []
        for compute in (lambda known, kind=kind: gains_of(kind, known), plain[kind]):
            found = np.zeros(len(rewards))
            for at in range(0, len(rewards), GROUP):
                known = at + np.flatnonzero(np.isfinite(rewards[at : at + GROUP]))
                found[known] = compute(rewards[known])
            papers.append(found)
        cells = [f"{np.abs(own - other).max():.1e}" for other in (theirs, *papers)]
        lines.append(f"| {' | '.join([kind, f'{np.abs(own).max():.4f}', *cells])} |")
    return [*lines, ""]


# Speed.


def letters(texts: Sequence[str]) -> list[float]:
    """A reward that costs nothing."""
    return [sum(map(ord, text)) % 97 / 97 for text in texts]


def speed_table(folder: Path, args: argparse.Namespace) -> list[str]:
    rows = list(map(json.loads, Path(args.dataset).read_text().splitlines()))
    if "messages" not in rows[0]:
        rows = [{"prompt": f"{row['question']}\n", "completion": row["answer"]} for row in rows]
    args.dataset = str(folder / "rows.jsonl")
    num_prompts = args.steps * args.answers // SPEED_GROUP
    Path(args.dataset).write_text("".join(json.dumps(row) + "\n" for row in rows[:num_prompts]))
    lines = [
        *against_trl.title(),
        f"{against_trl.versions()}; {args.rounds} rounds of {args.steps} steps, the first left out; {args.answers} "
        f"answers to {args.answers // SPEED_GROUP} prompts; `{' '.join(['python', *sys.argv])}`",
        "",
        "| processor seconds of a step: TRL | the kit | the kit's over TRL's (range of rounds) | of generating: TRL "
        "| the kit | the kit's over TRL's (range of rounds) | tokens of an answer: TRL | the kit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rounds = [[run_side(side, args) for side in ("trl", "kit")] for _ in range(args.rounds)]
    assert all(sorted(theirs["prompts"]) == sorted(own["prompts"]) for theirs, own in rounds), "the prompts differ"
    cells = []
    for what in ("step", "generating"):
        pairs = [[side[what] for side in each] for each in rounds]
        ratios = [own / theirs for theirs, own in pairs]
        cells += [f"{np.median(side):.3f}" for side in zip(*pairs, strict=True)]
        cells.append(f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    cells += [f"{np.mean([each[side]['tokens'] for each in rounds]):.1f}" for side in (0, 1)]
    return [*lines, f"| {' | '.join(cells)} |", ""]


def run_side(side: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a side in a process of its own: seconds of a step and of generating, tokens of an answer, and the prompts."""
    with tempfile.TemporaryDirectory() as folder:
        against_trl.run([__file__, f"--{side}", folder, json.dumps({**vars(args), "out": None})])
        found: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    print(side, {name: found[name] for name in ("step", "generating", "tokens")}, file=sys.stderr, flush=True)
    return found


class Meter:
    """Processor seconds of a side."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.generating: list[float] = []
        self.prompts: list[list[int]] = []
        self.lengths: list[int] = []

    @staticmethod
    def now() -> float:
        """Of this process, its children that live, and those that have ended."""
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        times = [each.cpu_times() for each in processes]
        ended = times[0].children_user + times[0].children_system
        return float(ended + sum(each.user + each.system for each in times))

    def end_step(self) -> None:
        self.ends.append(self.now())
        self.generating.append(0.0)

    def generate(self, prompts: Sequence[Sequence[int]], call: Callable[[], Any], ids: Callable[[Any], Any]) -> Any:
        """Return the result of a call that generates; ``ids`` takes the answers from it."""
        began = self.now()
        result = call()
        self.generating = self.generating or [0.0]
        self.generating[-1] += self.now() - began
        self.prompts += map(list, prompts)
        self.lengths += map(len, ids(result))
        return result

    def write(self, folder: str) -> None:
        found = {
            "step": float(np.mean(np.diff(self.ends))),
            "generating": float(np.mean(self.generating[1 : len(self.ends)])),
            "tokens": float(np.mean(self.lengths)),
            "prompts": self.prompts,
        }
        Path(folder, "result.json").write_text(json.dumps(found))


def train_with_trl(folder: str, args: argparse.Namespace) -> None:
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    meter = Meter()

    class Metered(GRPOTrainer):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: Any, *others: Any, **more: Any) -> Any:
            def call() -> Any:
                return super(Metered, self)._generate_single_turn(prompt_ids, *others, **more)

            return meter.generate(prompt_ids, call, lambda result: result[0])

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.end_step()

    config = GRPOConfig(
        output_dir=f"{folder}/run",
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=args.answers,
        num_generations=SPEED_GROUP,
        max_completion_length=args.max_new_tokens,
        max_steps=args.steps,
        learning_rate=SPEED_RATE,
        lr_scheduler_type="constant",
        top_k=0,
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = load_dataset("json", data_files=args.dataset, split="train")
    if "messages" in rows.column_names:
        rows = rows.map(lambda row: {"prompt": row["messages"][:1]})
    rows = rows.select_columns(["prompt"])

    def reward(completions: Sequence[Any], **_: Any) -> list[float]:
        return letters([each if isinstance(each, str) else each[0]["content"] for each in completions])

    Metered(model=args.speed, reward_funcs=reward, args=config, train_dataset=rows, callbacks=[Clock()]).train()
    meter.write(folder)


def train_with_the_kit(folder: str, args: argparse.Namespace) -> None:
    import runpy

    import kit.rollouts.sampler
    import kit.train.step

    meter = Meter()
    generate, step = kit.rollouts.sampler.generate_answers, kit.train.step.train_step

    def metered(model: Any, requests: Any, **more: Any) -> Any:
        prompts = [each.ids for each in requests]
        return meter.generate(prompts, lambda: generate(model, requests, **more), lambda found: [c.ids for c in found])

    def metered_step(*given: Any, **more: Any) -> Any:
        result = step(*given, **more)
        meter.end_step()
        return result

    kit.rollouts.sampler.generate_answers = metered
    kit.train.step.train_step = metered_step
    reward = Path(folder, "reward.py")
    reward.write_text(f"def letters(expected, answer, row):\n    return {'sum(map(ord, answer)) % 97 / 97'}\n")
    flags = {
        "model_name_or_path": args.speed,
        "dataset": args.dataset,
        "eval_dataset": "null",
        "predict_with_generate": "false",
        "method": "full",
        "objective": "grpo",
        "policy_loss": "dapo",  # TRL's default
        "rewards": f"{reward}:letters",
        "num_generations": SPEED_GROUP,
        "max_length": args.max_length,
        "max_new_tokens": args.max_new_tokens,
        "global_batch_size": args.answers,
        "per_device_train_batch_size": args.answers,
        "per_device_eval_batch_size": args.answers,
        "max_steps": args.steps,
        "learning_rate": SPEED_RATE,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0,
        "shuffle": "false",
        "save_steps": 0,
        "output_dir": f"{folder}/run",
    }
    sys.argv = ["finetune.py", *(word for key, value in flags.items() for word in (f"--{key}", str(value)))]
    runpy.run_path(str(ROOT / "recipes/finetune.py"), run_name="__main__")
    meter.write(folder)


if __name__ == "__main__":
    sides = {"--trl": train_with_trl, "--kit": train_with_the_kit}
    if sys.argv[1:2] and sys.argv[1] in sides:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])  # both compute with as many threads as cores
        torch.set_num_threads(1)
        sides[sys.argv[1]](sys.argv[2], argparse.Namespace(**json.loads(sys.argv[3])))
    else:
        main()
