"""Each policy loss is the equation of its paper, written down here answer by answer, however the batch is cut up."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kit.config.settings.objective import ObjectiveSettings
from kit.data.feed.batches import MicroBatch
from kit.rollouts.advantages import add_advantages, advantages, gdpo_advantages
from kit.rollouts.trajectories import Segment, Trajectory
from kit.tasks.grpo.loss import PolicyLoss

LENGTHS = [3, 1, 4, 2, 5, 2]  # of the answers to two prompts
GAINS = [1.2, -0.7, -0.5, 0.0, 2.0, -2.0]
MOST = 6  # tokens of an answer


def logps(seed):
    draw = np.random.default_rng(seed)
    return [torch.tensor(-1.5 + draw.normal(0, 0.4, n)) for n in LENGTHS]


NOW, OLD, REFERENCE, ENGINE = logps(1), logps(2), logps(3), logps(4)


def micro_batch(answers):
    of_targets = {"old_logps": OLD, "reference_logps": REFERENCE, "engine_logps": ENGINE}
    ids = torch.cat([torch.full((LENGTHS[i],), k) for k, i in enumerate(answers)])
    return MicroBatch(
        input_ids=ids[None],
        target_positions=ids,
        targets=ids,
        weights=torch.ones(len(ids)),
        dataset_ids=ids * 0,
        segments=tuple((0, LENGTHS[i], i) for i in answers),
        sequence_ids=ids,
        per_sequence={"advantages": torch.tensor([GAINS[i] for i in answers], dtype=torch.float64)},
        per_target={name: torch.cat([each[i] for i in answers]) for name, each in of_targets.items()},
    )


BATCH = SimpleNamespace(
    num_samples=len(LENGTHS), target_weights=np.array([float(sum(LENGTHS))]), most_targets=MOST * len(LENGTHS)
)


def by_the_paper(kind, by_sequence, now, epsilon, high, beta, estimator, cap):
    """The loss of the whole batch from the log-probabilities of each answer."""
    answers = []
    for new, old, reference, engine, gain in zip(now, OLD, REFERENCE, ENGINE, GAINS, strict=True):
        ratio = (new - old).exp()
        d = reference - new
        kl = {"k2": d * d / 2, "k3": d.exp() - 1 - d}[estimator]

        def clipped(r, gain=gain):
            return -torch.minimum(r * gain, torch.clamp(r, 1 - epsilon, 1 + high) * gain)

        if kind == "gspo" or by_sequence:
            losses = clipped((new - old).mean().exp()).expand(len(new))
        elif kind == "rloo":
            losses = clipped((new - old).sum().exp()).expand(len(new))
        elif kind == "sapo":
            t = 0.7 if gain > 0 else 1.6
            losses = -4 / t / (1 + torch.exp(-t * (ratio - 1))) * gain
        elif kind == "cispo":
            losses = -torch.clamp(ratio, max=1 + high).detach() * gain * new
        else:
            losses = clipped(ratio)
        drift = (old - engine).sum() if kind in ("gspo", "rloo") or by_sequence else old - engine
        weights = drift.exp().clamp(max=cap) if cap else 1.0
        answers.append(losses * weights + (0 if kind == "rloo" else beta * kl))
    if kind in ("dapo", "cispo"):
        return torch.cat(answers).mean()
    if kind == "dr_grpo":
        return sum(each.sum() for each in answers) / (MOST * len(answers))
    return sum(each.mean() for each in answers) / len(answers)


@pytest.mark.parametrize(
    ("kind", "level"),
    [*((kind, None) for kind in "grpo dapo dr_grpo gspo cispo rloo sapo".split())]
    + [(kind, "sequence") for kind in ("grpo", "dapo", "dr_grpo")],
)
def test_loss_and_gradient_are_those_of_the_paper(kind, level):
    for high, beta, estimator, cap in (
        *((None, 0.0, "k3", None), (0.5, 0.3, "k2", None), (0.28, 0.04, "k2", 1.3), (None, 0.1, "k3", None)),
        (None, 0.0, "k3", 1.2),
    ):
        settings = ObjectiveSettings(
            objective="grpo",
            policy_loss=kind,
            importance_sampling_level=level,
            sapo_temperature_pos=0.7,
            sapo_temperature_neg=1.6,
            epsilon_high=high,
            beta=beta or None,
            kl_estimator=estimator,
            vllm_importance_sampling_cap=cap,
        )
        objective = PolicyLoss(["tiny"], settings)
        for cut in ([[0, 1, 2, 3, 4, 5]], [[0, 3], [1], [2, 5, 4]]):
            own = [each.clone().requires_grad_() for each in NOW]
            divisors = objective.divisors(BATCH)
            parts = []
            for answers in cut:
                batch = micro_batch(answers)
                if not beta:
                    del batch.per_target["reference_logps"]
                parts.append(objective.terms(-torch.cat([own[i] for i in answers]), batch))
            found = sum(terms[0] for terms, _ in parts) / divisors[0]
            found.backward()
            wanted_from = [each.clone().requires_grad_() for each in NOW]
            wanted = by_the_paper(kind, level is not None, wanted_from, 0.2, high or 0.2, beta, estimator, cap)
            wanted.backward()
            assert found.item() == pytest.approx(wanted.item(), rel=1e-9)
            for one, other in zip(own, wanted_from, strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-8, atol=1e-12)
            metrics = objective.metrics(sum(sums for _, sums in parts).tolist(), BATCH)
            assert metrics["loss"] == pytest.approx(wanted.item(), rel=1e-9) and ("kl" in metrics) == bool(beta)
            assert not cap or 0 < metrics["sampling/capped_ratio"] < 1


def test_an_answer_of_which_nothing_is_learned_counts_in_the_divisor_alone():
    settings = ObjectiveSettings(objective="grpo", policy_loss="gspo")
    batch = micro_batch([0, 1])
    batch = MicroBatch(**{**vars(batch), "per_sequence": {"advantages": torch.tensor([1.2, 5.0, -1.0])}})
    batch = MicroBatch(**{**vars(batch), "segments": (*batch.segments, (0, 4, 9))})
    del batch.per_target["reference_logps"]
    (term,), _ = PolicyLoss(["tiny"], settings).terms(-torch.cat(NOW[:2]), batch)
    ratios = [(NOW[i] - OLD[i]).mean().exp() for i in (0, 1)]
    assert term.item() == pytest.approx(
        -sum(min(r * a, min(max(r, 0.8), 1.2) * a) for r, a in zip(ratios, (1.2, 5.0), strict=True))
    )


def test_advantages_are_those_of_the_papers_and_an_answer_without_reward_takes_no_part():
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0], [3.0, np.nan, 0.0, 0.0]])
    of_grpo = advantages(rewards, "grpo")
    assert of_grpo[0] == pytest.approx((rewards[0] - 0.5) / (rewards[0].std(ddof=1) + 1e-4))
    assert not of_grpo[1].any()
    assert of_grpo[2] == pytest.approx(np.array([2.0, 0.0, -1.0, -1.0]) / (np.std([3.0, 0.0, 0.0], ddof=1) + 1e-4))
    assert advantages(rewards, "dr_grpo")[0] == pytest.approx([0.5, -0.5, -0.5, 0.5])
    assert advantages(rewards, "rloo")[0] == pytest.approx([1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3])
    assert advantages(rewards, "rloo")[2] == pytest.approx([3.0, 0.0, -1.5, -1.5])


def test_scale_rewards_divides_by_the_standard_deviation_of_the_group_of_the_batch_or_not_at_all():
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0], [3.0, np.nan, 0.0, 0.0]])
    centred = np.array([[0.5, -0.5, -0.5, 0.5], [0, 0, 0, 0], [2.0, 0.0, -1.0, -1.0]])
    std = np.std([1.0, 0, 0, 1, 2, 2, 2, 2, 3, 0, 0], ddof=1)
    for kind in ("dapo", "dr_grpo"):
        assert advantages(rewards, kind, "none") == pytest.approx(centred)
        assert advantages(rewards, kind, "batch") == pytest.approx(centred / (std + 1e-4))
        assert (advantages(rewards, kind, "group") == advantages(rewards, "grpo")).all()


def test_gdpo_normalises_each_reward_in_its_group_before_the_sum_and_the_sum_over_the_batch():
    draws, weights = np.random.default_rng(0), (1.0, 0.5, -2.0)
    rewards = draws.normal(size=(3, 4, 3)) * (1.0, 100.0, 1e-2)
    rewards[0, :, 1] = 7.0  # no variance
    rewards[2] = 1.0
    rewards[1, 2, 0] = np.nan
    known = np.ones((3, 4), bool)
    known[1, 2] = False
    total = np.zeros((3, 4))
    for p in range(3):
        for k in range(3):
            own = rewards[p, known[p], k]
            total[p, known[p]] += weights[k] * (own - own.mean()) / (own.std(ddof=1) + 1e-4)
    wanted = np.where(known, (total - total[known].mean()) / (total[known].std(ddof=1) + 1e-4), 0)
    assert gdpo_advantages(rewards, weights) == pytest.approx(wanted, abs=1e-12)
    assert not gdpo_advantages(rewards, weights)[2].any()  # exactly: dynamic sampling replaces the group


def test_rloo_subtracts_beta_times_the_log_ratio_of_the_whole_completion_from_its_reward():
    rewards = [1.0, 0.0, 0.5, np.nan]
    group = [Trajectory((0, 0, k), [Segment([1], 0.0)], True, [r], r) for k, r in enumerate(rewards)]
    settings = ObjectiveSettings(objective="grpo", policy_loss="rloo", beta=0.05)
    assert add_advantages([group], settings)[0] == pytest.approx([0.75, -0.75, 0, 0])
    for each, old, reference in zip(group[:3], OLD, REFERENCE, strict=False):
        each.logps = {"old_logps": old.tolist(), "reference_logps": reference.tolist()}
    shaped = [r - 0.05 * (o - n).sum().item() for r, o, n in zip(rewards[:3], OLD, REFERENCE, strict=False)]
    wanted = [r - np.mean([other for j, other in enumerate(shaped) if j != i]) for i, r in enumerate(shaped)]
    assert add_advantages([group], settings)[0] == pytest.approx([*wanted, 0])
    assert [each.advantage for each in group] == pytest.approx([*wanted, 0])


def test_logits_are_divided_by_the_rollout_temperature():
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = MicroBatch(**{**vars(micro_batch([0, 3])), "targets": torch.tensor([3, 1, 4, 1, 5])})
    for temperature in (0.7, 1.3):
        objective = PolicyLoss(["tiny"], ObjectiveSettings(objective="grpo", rollout_temperature=temperature))
        found = torch.cat([objective.target_values(batch, logits[rows], rows) for rows in (slice(0, 2), slice(2, 5))])
        powers = logits.exp() ** (1 / temperature)
        wanted = (powers / powers.sum(1, keepdim=True))[range(5), batch.targets]
        torch.testing.assert_close((-found).exp(), wanted)
    assert PolicyLoss(["tiny"], ObjectiveSettings(objective="grpo")).target_values is None  # the usual, fused loss
