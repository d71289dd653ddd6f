"""Losses of heads are their closed forms, in value and gradient, however a batch is cut; so are what they measure."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kit.config.settings.objective import ObjectiveSettings
from kit.data.feed.batches import MicroBatch
from kit.data.feed.feed import GlobalBatch
from kit.data.feed.ranks import Ranks
from kit.train.heads import Classification, Embedding, RewardModelling, Texts, retrieval

DRAW = np.random.default_rng(0)
NONE = torch.empty(0)


def micro_batch(values, roles=None, lengths=None, samples=None, states=NONE):
    n = len(values)
    return MicroBatch(
        input_ids=states,
        target_positions=NONE,
        targets=NONE,
        weights=NONE,
        dataset_ids=NONE,
        segments=tuple((0, length, i) for length, i in zip(lengths or [1] * n, samples or range(n), strict=True)),
        per_sequence={"values": torch.as_tensor(values), "roles": torch.as_tensor(roles or [0] * n)},
    )


def of_parts(objective, scores, values, cuts, num_samples):
    """Loss, gradient and metrics of scores whose micro-batches end at ``cuts``."""
    scores = torch.tensor(scores, dtype=torch.float32, requires_grad=True)
    batch, sums = SimpleNamespace(num_samples=num_samples), 0
    for start, end in zip([0, *cuts], [*cuts, len(scores)], strict=True):
        (term,), numbers = objective.terms(scores[start:end], micro_batch(values[start:end]))
        (term / objective.divisors(batch)[0]).backward()
        sums = sums + numbers
    return objective.metrics(sums.tolist(), batch), scores.grad.double(), objective.details(sums.tolist())


def test_the_loss_of_rewards_is_that_of_bradley_and_terry_with_margin_and_centring():
    scores = DRAW.normal(0, 2, (12, 1)).astype(np.float32)
    margins = np.repeat(DRAW.random(6), 2)[:, None].astype(np.float32)
    objective = RewardModelling(["all"], ObjectiveSettings(objective="reward", center_rewards_coefficient=0.02))
    metrics, gradient, details = of_parts(objective, scores, margins, [2, 10], 6)
    y = torch.tensor(scores.astype(np.float64), requires_grad=True)
    good, bad = y[::2, 0], y[1::2, 0]
    chance = 1 / (1 + torch.exp(-(good - bad - torch.tensor(margins[::2, 0]))))
    loss = (-chance.log() + 0.02 * (good + bad) ** 2).mean()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert torch.allclose(gradient, y.grad, atol=2e-6)
    assert metrics["accuracy"] == (good > bad).double().mean().item()
    assert metrics["margin"] == pytest.approx((good - bad).mean().item())
    edges = details["margins"]["edges"]
    counts = np.histogram((good - bad).detach(), [-np.inf, *edges, np.inf])[0]
    assert details["margins"]["counts"] == counts.tolist()


@pytest.mark.parametrize("several", [False, True])
def test_the_loss_of_labels_is_cross_entropy_or_binary_cross_entropy(several):
    scores = DRAW.normal(0, 2, (9, 3)).astype(np.float32)
    hot = np.eye(3)[[0, 1, 2, 0, 0, 1, 0, 1, 0]]
    values = hot.argmax(1)[:, None].astype(np.float32)
    if several:  # the first text has none, and the second one two
        hot[0], hot[1] = 0, [1, 1, 0]
        values = np.concatenate([values, np.full((9, 1), np.nan, np.float32)], axis=1)
        values[0], values[1] = np.nan, [1, 0]
    kind = f"{'multi' if several else 'single'}_label_classification"
    objective = Classification(["all"], ObjectiveSettings(objective="classify", labels=list("abc"), problem_type=kind))
    metrics, gradient, details = of_parts(objective, scores, values, [4], 9)
    y, wanted = torch.tensor(scores.astype(np.float64), requires_grad=True), torch.tensor(hot)
    p = torch.sigmoid(y) if several else torch.softmax(y, 1)
    both = wanted * p.log() + ((1 - wanted) * (1 - p).log() if several else 0)
    loss = -both.mean() if several else -both.sum(1).mean()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert torch.allclose(gradient, y.grad, atol=2e-6)
    found = (scores > 0).astype(int) if several else np.eye(3, dtype=int)[scores.argmax(1)]
    assert metrics["accuracy"] == pytest.approx((found == hot).all(1).mean())
    f1 = [2 * (found * hot)[:, i].sum() / max(1, found[:, i].sum() + hot[:, i].sum()) for i in range(3)]
    assert [metrics[f"f1/{name}"] for name in "abc"] == pytest.approx(f1)
    assert metrics["f1"] == pytest.approx(np.mean(f1))
    counts = details["confusion_of_each" if several else "confusion"]
    assert np.sum(counts) == (27 if several else 9)
    assert several or counts[0][1] == ((hot[:, 0] == 1) & (found[:, 1] == 1)).sum()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_gradients_of_embeddings_are_those_of_the_whole_batch_however_it_is_cut(pooling):
    num, dims = 7, [16, 8]
    roles = [role for i in range(num) for role in range(3 if i % 2 else 2)]  # some without a negative
    samples = [i for i in range(num) for _ in range(3 if i % 2 else 2)]
    lengths = [1 if pooling == "last" else 1 + i % 3 for i in range(len(roles))]
    states = torch.tensor(DRAW.normal(0, 1, (sum(lengths), 32)), dtype=torch.float32)
    ends = np.cumsum(lengths)
    objective = Embedding(["all"], ObjectiveSettings(objective="embed", pooling=pooling, matryoshka_dims=dims))
    parts = []
    for start, end in ((0, 5), (5, 14), (14, len(roles))):
        rows = slice(0 if start == 0 else ends[start - 1], ends[end - 1])
        of = roles[start:end], lengths[start:end], samples[start:end]
        parts.append(micro_batch(np.zeros((end - start, 0)), *of, states=states[rows]))

    class Model(torch.nn.Module):
        def forward(self, input_ids, **_):
            return input_ids

    prepared = SimpleNamespace(accelerator=SimpleNamespace(device=torch.device("cpu")), model=Model(), ranks=Ranks())
    batch = GlobalBatch(parts, *[np.zeros(1)] * 3, 0.0, [], num_samples=num)
    gradients, sums = [], 0
    for part in objective.begin_step(prepared, batch).micro_batches:
        own = part.input_ids.clone().requires_grad_()
        (term,), numbers = objective.terms(own, part)
        gradients.append(torch.autograd.grad(term, own)[0])
        sums = sums + numbers

    y = states.double().requires_grad_()
    vectors = torch.stack([part.mean(0) for part in y.split(lengths)])
    role = torch.tensor(roles)
    loss = 0
    for size in (32, *dims):
        unit = vectors[:, :size] / vectors[:, :size].norm(dim=1, keepdim=True)
        chances = torch.exp(unit[role == 0] @ torch.cat([unit[role == 1], unit[role == 2]]).T / 0.05)
        loss = loss - (chances.diagonal() / chances.sum(1)).log().mean()
    loss.backward()
    assert objective.metrics(sums.tolist(), batch)["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert torch.allclose(torch.cat(gradients).double(), y.grad, rtol=1e-5, atol=2e-6)


def test_retrieval_counts_a_text_that_occurs_twice_as_one_document():
    vectors = torch.tensor([[1, 0], [1, 0.1], [0, 1], [1, 0.05], [1, 0], [1, 0.1]], dtype=torch.float64)
    roles, samples = torch.tensor([0, 1, 0, 1, 0, 1]), torch.tensor([0, 0, 1, 1, 2, 2])
    keys = [b"question", b"yes", b"other", b"no", b"question", b"yes"]
    found = retrieval(Texts(vectors, roles, samples, 0), keys)
    # "question" finds "no" before its own "yes", twice; "other" is orthogonal to both, and nearer to "yes".
    assert found["mrr"] == pytest.approx(1 / 2) and found["recall_at_1"] == 0 and found["recall_at_10"] == 1
    assert found["ndcg_at_10"] == pytest.approx(1 / np.log2(3))
