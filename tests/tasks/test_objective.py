"""Objectives are the equations of their papers on full logits, and do not depend on how a batch is cut."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from data_helpers import open_recipe_data, pairs, preference_pairs, rated_answers, write
from helpers import actual_strategy

from kit.config.recipe import Recipe
from kit.config.settings.objective import ObjectiveSettings
from kit.data.feed.batches import Collator
from kit.data.feed.data_ranks import Ranks
from kit.data.feed.feed import GlobalBatch
from kit.data.kinds.unpaired_preference import LABEL
from kit.model.build import build_model, open_config
from kit.model.load_plan import LoadPlan
from kit.model.pretrained.tokenizer import open_tokenizer
from kit.tasks.objectives import build_objective
from kit.tasks.preference.loss import Pairs
from kit.train.policy import Policy
from kit.train.precompute import add_references
from kit.train.step import train_step

NUM = 8  # pairs, or answers with a label
ALONE = [[[i] for i in range(NUM)]]  # one micro-batch, each sample in rows of its own
ANSWERS = [
    {"objective": "sft"},
    {"objective": "dft"},
    {"objective": "sft", "label_smoothing_factor": 0.2},
    {"objective": "sft", "z_loss_coef": 1e-2},
    {"objective": "sft", "z_loss_coef": 1e-2, "label_smoothing_factor": 0.2},
    {"objective": "eaft", "eaft_alpha": 1.5},
]
CASES = [
    {"objective": "dpo", "beta": 0.3},
    {"objective": "dpo", "label_smoothing": 0.2},
    {"objective": "dpo", "dpo_loss": "robust", "label_smoothing": 0.2},
    {"objective": "dpo", "dpo_loss": "hinge", "beta": 0.5},
    {"objective": "dpo", "dpo_loss": "ipo"},
    {"objective": "dpo", "dpo_loss": "sigmoid_norm", "beta": 5.0},
    {"objective": "dpo", "dpo_loss": "apo_zero", "beta": 0.3},
    {"objective": "dpo", "dpo_loss": "apo_down", "beta": 0.3},
    {"objective": "dpo", "dpo_loss": "bco_pair", "rpo_alpha": 0.7},
    {"objective": "orpo", "beta": 0.7},
    {"objective": "simpo", "simpo_gamma": 0.3},
    {"objective": "cpo", "cpo_alpha": 0.5},
    {"objective": "cpo", "cpo_alpha": 0.0},
    {"objective": "kto", "desirable_weight": 1.5, "undesirable_weight": 0.5},
]


def name_of(case):
    return "-".join(str(value) for value in case.values())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """By kind of rows."""
    folder = tmp_path_factory.mktemp("preferences")
    for kind, rows in (
        ("preference", preference_pairs(NUM)),
        ("unpaired_preference", rated_answers(NUM)),
        ("answers", pairs(NUM)),
    ):
        write(folder / f"{kind}.jsonl", *rows)
    return folder


@pytest.fixture(scope="module")
def run(model_folder, files):
    """A function that opens a ``Trial`` of an objective with its settings, and other settings as keywords."""
    torch.set_num_threads(1)

    def run(case, method="full", moved=True, **changes):
        kind = "unpaired_preference" if case["objective"] == "kto" else "answers" if case in ANSWERS else "preference"
        paths = {"model_name_or_path": str(model_folder), "dataset": str(files / f"{kind}.jsonl")}
        batch = {"global_batch_size": NUM, "max_length": 256}
        return Trial(Recipe(**paths, **batch, method=method, **case, **changes), moved)

    return run


class Trial:
    """Data and model of a recipe. The weights are ``moved`` away from those of the reference."""

    def __init__(self, recipe, moved):
        self.recipe = recipe
        tokenizer = open_tokenizer(recipe)
        self.data = open_recipe_data(recipe, tokenizer, 320)
        self.samples, self.mismatched = self.data.train, self.data.mismatched(self.data.train)
        self.labels = self.samples.values[:, LABEL].astype(bool) if recipe.objective == "kto" else None
        plan = LoadPlan(compute_dtype="float32", device="cpu")
        self.model = build_model(recipe, open_config(recipe), plan, packing=recipe.packing)
        self.sequences = [self.samples.sequences(i) for i in range(NUM)]
        if self.mismatched is not None:
            partners = self.mismatched.partners
            self.sequences = [[self.samples[i], self.with_answer_of(i, partners[i])] for i in range(NUM)]
        with torch.no_grad():
            self.known, _ = self.on_full_logits()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.0)
        strategy = actual_strategy(sharded_layers=None)
        self.prepared = Policy(Accelerator(cpu=True), Ranks(), self.model, optimizer, strategy, tokenizer=tokenizer)
        if recipe.precomputes_reference:
            add_references(self.prepared, recipe, self.data, 1, lambda batches, *_: batches)
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if moved and (recipe.method == "full" or "lora_B" in name):
                    parameter.add_(0.1 * torch.randn_like(parameter))

    def with_answer_of(self, i, partner):
        """The prompt of sample ``i`` and the answer of another one."""
        starts = [int(np.flatnonzero(self.samples[each][1])[0]) for each in (i, partner)]
        both = zip(self.samples[i], self.samples[int(partner)], strict=True)
        return [np.concatenate([own[: starts[0]], theirs[starts[1] :]]) for own, theirs in both]

    def logits(self, ids):
        """Those of all positions but the last, float64 [T - 1, V], and the targets."""
        ids = torch.from_numpy(ids[None].astype(np.int64))
        return self.model(ids).logits[0, :-1].double(), ids[0, 1:]

    def logp(self, ids, weights):
        """The log-probability of what is supervised, float64 []."""
        logits, targets = self.logits(ids)
        return -(F.cross_entropy(logits, targets, reduction="none") * torch.from_numpy(weights[1:])).sum()

    def on_full_logits(self):
        """Log-probabilities and lengths, float64 [NUM, 2]: of pairs; of answers with a label and mismatched ones."""
        logps = torch.stack([torch.stack([self.logp(*each) for each in both]) for both in self.sequences])
        lengths = [[weights[1:].sum() for _, weights in both] for both in self.sequences]
        return logps, torch.tensor(lengths, dtype=torch.float64)

    def batch(self, micro_batches=ALONE):
        """A global batch. ``micro_batches``: lists of packs, which are lists of samples."""
        samples, collator = self.samples, Collator(NUM, 0, self.recipe.packing, max_length=512)
        indices = np.array([i for packs in micro_batches for pack in packs for i in pack], np.int64)
        others = []
        if self.mismatched is not None:
            unpacked = replace(collator, packing=False)
            rows = [[np.array([i]) for pack in packs for i in pack] for packs in micro_batches]
            others = [unpacked.collate(self.mismatched, each) for each in rows]
        return GlobalBatch(
            [collator.collate(samples, [np.array(pack) for pack in packs]) for packs in micro_batches],
            target_weights=np.array([samples.target_weights[indices].sum()]),
            num_targets=np.ones(1, np.int64),
            num_tokens=np.ones(1, np.int64),
            epoch=1.0,
            origins=[],
            num_samples=len(indices),
            chosen_weight=samples.kind.chosen_weight(samples, indices),
            mismatched=others,
        )

    def step(self, batch=None, objective=None):
        """Loss, metrics, and gradients by name, of the step of a run."""
        found = {}
        result = train_step(
            self.prepared,
            objective or build_objective(self.recipe, ["a"]),
            self.batch() if batch is None else batch,
            0.0,
            max_grad_norm=0,
            before_update=lambda: found.update(gradients_of(self.model)),
        )
        return result.loss, result.metrics, found

    def gradients(self, loss):
        loss.backward()
        found = gradients_of(self.model)
        self.model.zero_grad()
        return found


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_same_gradients(ours, theirs, share=1e-5):
    """Every difference is below this share of the largest gradient."""
    assert ours.keys() == theirs.keys()
    largest = max(gradient.abs().max().item() for gradient in theirs.values())
    assert largest > 1e-4
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max().item() < share * largest, name


def sigmoid(value):
    return 1 / (1 + (-value).exp())


def paper_of_answers(trial):
    """The mean over the supervised tokens, where the objective has no pairs."""
    settings, total, count = trial.recipe, 0.0, 0.0
    for [(ids, weights)] in trial.sequences:
        logits, targets = trial.logits(ids)
        log_p = logits - logits.logsumexp(dim=-1, keepdim=True)
        losses = -log_p.gather(1, targets[:, None])[:, 0]
        if settings.objective == "dft":
            losses = losses * (-losses).exp().detach()
        if settings.objective == "eaft":
            p = logits.detach().softmax(dim=-1).topk(20, dim=-1).values
            p /= p.sum(dim=-1, keepdim=True)
            losses = losses * (-(p * p.log()).sum(dim=-1) / math.log(20)) ** settings.eaft_alpha
        smoothing = settings.label_smoothing_factor
        losses = (1 - smoothing) * losses - smoothing * log_p.mean(dim=-1)
        losses = losses + settings.z_loss_coef * logits.logsumexp(dim=-1) ** 2
        total += (losses * torch.from_numpy(weights[1:])).sum()
        count += weights[1:].sum()
    return total / count


def paper(trial):
    """The number that is minimised, as the papers have it, from full logits."""
    settings, known = trial.recipe, trial.known
    if settings.declared.rows == "answers":
        return paper_of_answers(trial)
    logps, lengths = trial.on_full_logits()
    beta, e = settings.reward_scale, settings.label_smoothing
    if settings.objective == "kto":
        z = (logps - known)[:, 1].mean().detach().clamp(min=0)
        ratio = (logps - known)[:, 0]
        good = settings.desirable_weight * (1 - sigmoid(beta * (ratio - z)))
        bad = settings.undesirable_weight * (1 - sigmoid(beta * (z - ratio)))
        return torch.where(torch.from_numpy(trial.labels), good, bad).mean()
    chosen, rejected = logps.T
    nll = -chosen.sum() / lengths[:, 0].sum()
    if settings.objective == "orpo":
        p = (logps / lengths).exp()
        odds = p / (1 - p)
        return nll - beta * (sigmoid((odds[:, 0] / odds[:, 1]).log())).log().mean()
    if settings.objective == "simpo":
        per_token = logps / lengths
        return -sigmoid(beta * per_token[:, 0] - beta * per_token[:, 1] - settings.simpo_gamma).log().mean()
    if settings.objective == "cpo":
        return -sigmoid(beta * chosen - beta * rejected).log().mean() + settings.cpo_alpha * nll
    h = (chosen - known[:, 0]) - (rejected - known[:, 1])
    per_token = (chosen - known[:, 0]) / lengths[:, 0] - (rejected - known[:, 1]) / lengths[:, 1]
    right, wrong = -sigmoid(beta * h).log(), -sigmoid(-beta * h).log()
    win, lose = sigmoid(beta * (chosen - known[:, 0])), sigmoid(beta * (rejected - known[:, 1]))
    loss = {
        "sigmoid": (1 - e) * right + e * wrong,
        "robust": ((1 - e) * right - e * wrong) / (1 - 2 * e),
        "hinge": torch.maximum(torch.zeros(()), 1 - beta * h),
        "ipo": (per_token - 1 / (2 * beta)) ** 2,
        "sigmoid_norm": -sigmoid(beta * per_token).log(),
        "apo_zero": (1 - win) + lose,
        "apo_down": win + (1 - sigmoid(beta * h)),
        "bco_pair": -win.log() - (1 - lose).log(),
    }[settings.dpo_loss].mean()
    return loss + settings.rpo_alpha * nll


@pytest.mark.parametrize("case", [*ANSWERS, *CASES], ids=name_of)
def test_the_loss_and_gradients_are_those_of_the_paper_on_full_logits(run, case):
    """Of adapters, whose reference is their base; of one case of each kind of rows also in full training."""
    check_against_the_paper(run(case, "lora"))
    if case in (ANSWERS[0], CASES[0], CASES[-1]):
        check_against_the_paper(run(case, "full"))


def check_against_the_paper(trial):
    expected = paper(trial)
    theirs = trial.gradients(expected)
    loss, _, ours = trial.step()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert_same_gradients(ours, theirs)


WITH_REFERENCE, PER_TOKEN, RATED = CASES[0], CASES[9], CASES[-1]


@pytest.mark.slow
@pytest.mark.parametrize("case", [ANSWERS[0], ANSWERS[-1], WITH_REFERENCE, PER_TOKEN, RATED], ids=name_of)
def test_a_step_is_the_same_however_its_samples_are_cut_and_packed(run, case):
    """Also the KL of kto, which goes over the global batch: a micro-batch has too few answers."""
    trial = run(case, "lora")
    whole = trial.step()
    assert case is not RATED or whole[1]["kl"] > 0
    cuts = [[[[i] for i in range(start, min(start + size, NUM))] for start in range(0, NUM, size)] for size in (1, 3)]
    others = [trial.step(trial.batch(cut)) for cut in cuts]
    for implementation in ("sdpa", "varlen"):
        packed = run(case, "lora", packing=True, attn_implementation=implementation)
        packs = [[[0, 1, 2, 3, 4, 5, 6, 7]]], [[[0, 5, 2], [7]], [[1, 3], [4, 6]]]
        others += [packed.step(packed.batch(each)) for each in packs]
    for loss, metrics, gradients in others:
        assert loss == pytest.approx(whole[0], rel=1e-6)
        assert metrics == pytest.approx(whole[1], rel=1e-5, abs=1e-5)
        assert_same_gradients(gradients, whole[2])


def expected_metrics(rewards, logps, lengths):
    """Of pairs: [NUM, 2] each."""
    margins = rewards[:, 0] - rewards[:, 1]
    means = {"rewards/margins": margins.mean(), "rewards/accuracies": (margins > 0).double().mean()}
    for column, name in enumerate(("chosen", "rejected")):
        for key, values in (("rewards", rewards), ("logps", logps), ("lengths", lengths)):
            means[f"{key}/{name}"] = values[:, column].mean()
    return {name: value.item() for name, value in means.items()}


@pytest.mark.parametrize("case", [CASES[0], CASES[4], *CASES[8:12]], ids=name_of)
def test_metrics_are_means_over_pairs(run, case):
    """Rewards are those that the loss compares: of orpo and simpo per token. nll_loss is in nats per token."""
    trial = run(case, "lora")
    logps, lengths = trial.on_full_logits()
    objective = case["objective"]
    compared = {"dpo": logps - trial.known, "cpo": logps}.get(objective, logps / lengths)
    expected = expected_metrics(trial.recipe.reward_scale * compared, logps, lengths)
    if objective in ("orpo", "cpo") or "rpo_alpha" in case:
        expected["nll_loss"] = (-logps[:, 0].sum() / lengths[:, 0].sum()).item()
    _, metrics, _ = trial.step()
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert objective != "dpo" or 0 < metrics["rewards/accuracies"] < 1


def pairs_of(chosen, rejected, length=10.0):
    """One pair of these log-probabilities, to differentiate, and a reference that gives 0 to both."""
    logps = torch.tensor([[chosen, rejected]], dtype=torch.float64, requires_grad=True)
    return Pairs(logps, torch.full_like(logps, length), torch.zeros_like(logps))


def test_a_margin_of_ten_thousand_nats_has_a_finite_loss_and_gradient():
    cases = [
        ({"objective": "dpo"}, 1e3),
        ({"objective": "dpo", "dpo_loss": "hinge"}, 1e3 + 1),
        ({"objective": "dpo", "dpo_loss": "robust", "label_smoothing": 0.2}, 1e3 * 0.8 / 0.6),
        ({"objective": "dpo", "dpo_loss": "ipo"}, (1e3 + 5) ** 2),
        ({"objective": "dpo", "dpo_loss": "sigmoid_norm"}, 1e2),
        ({"objective": "dpo", "dpo_loss": "bco_pair"}, 1e3),
        ({"objective": "orpo"}, 1e2),
        ({"objective": "simpo"}, 2e3 + 0.5),
        ({"objective": "cpo"}, 1e3),
    ]
    for case, expected in cases:
        objective = build_objective(ObjectiveSettings(**case), ["a"])
        wrong = pairs_of(-1e4 - 1e-3, -1e-3)
        loss = objective.losses(wrong)
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-2), (case, expected)
        assert wrong.logps.grad.isfinite().all() and wrong.logps.grad[0, 0] < 0, (case, expected)
        right = pairs_of(-1e-3, -1e4 - 1e-3)
        loss = objective.losses(right)
        loss.backward()
        assert loss.isfinite().all() and right.logps.grad.isfinite().all(), (case, expected)
        if case.get("dpo_loss", "sigmoid") == "sigmoid":
            assert loss.item() < 1e-10 and right.logps.grad.abs().max() < 1e-10, (case, expected)


def test_metrics_of_kto_are_means_over_good_and_over_bad_answers(run):
    trial = run(CASES[-1], "lora")
    logps, lengths = trial.on_full_logits()
    labels = torch.from_numpy(trial.labels)
    rewards = 0.1 * (logps - trial.known)
    expected = {"kl": max(0.0, (logps - trial.known)[:, 1].mean().item())}
    for name, chosen in (("chosen", labels), ("rejected", ~labels)):
        for key, values in (("rewards", rewards), ("logps", logps), ("lengths", lengths)):
            expected[f"{key}/{name}"] = values[chosen, 0].mean().item()
    expected["rewards/margins"] = expected["rewards/chosen"] - expected["rewards/rejected"]
    _, metrics, _ = trial.step()
    assert metrics == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("nats", [2.0, -2.0])
def test_the_kl_of_kto_is_the_mean_ratio_of_answers_to_other_prompts_and_not_below_0(run, nats):
    trial = run(CASES[-1], precompute_reference=True)
    with torch.no_grad():
        logps, _ = trial.on_full_logits()
    # Of the answers themselves other ratios: they have no part in it.
    ratios = np.stack([np.full(NUM, 5.0), nats + np.linspace(-1, 1, NUM)], axis=1)
    trial.samples.attach("references", logps.numpy() - ratios, per="sequence")
    _, metrics, _ = trial.step()
    assert metrics["kl"] == pytest.approx(max(nats, 0.0), abs=1e-5)
    assert metrics["rewards/chosen"] == pytest.approx(0.1 * 5.0, rel=1e-5)


def test_a_weight_of_a_token_counts_in_its_answers_log_probability_and_length(run):
    """Data may weight tokens: a weight of 2 is the token twice."""
    trial = run(CASES[10], "lora")
    batch = trial.batch()
    (micro_batch,) = batch.micro_batches
    twice = replace(micro_batch, weights=2 * micro_batch.weights)
    _, plain, _ = trial.step(batch)
    _, doubled, _ = trial.step(replace(batch, micro_batches=[twice]))
    assert doubled["logps/chosen"] == pytest.approx(2 * plain["logps/chosen"])
    assert doubled["lengths/chosen"] == 2 * plain["lengths/chosen"]
    assert doubled["rewards/chosen"] == pytest.approx(plain["rewards/chosen"])
