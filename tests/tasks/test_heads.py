"""Losses of heads are their closed forms, in value and gradient, however a batch is cut; so are what they measure."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.loss.loss_utils import ForSequenceClassificationLoss

from kit.config.settings.objective import ObjectiveSettings
from kit.data.feed.batches import MicroBatch
from kit.data.feed.data_ranks import Ranks
from kit.data.feed.feed import GlobalBatch
from kit.tasks.classify.loss import Classification
from kit.tasks.embed import retrieval as of_texts
from kit.tasks.embed.loss import Embedding
from kit.tasks.embed.retrieval import Texts, retrieval
from kit.tasks.objectives import build_objective
from kit.tasks.reward.loss import RewardModelling

DRAW = np.random.default_rng(0)
NONE = torch.empty(0)


def micro_batch(values, roles=None, lengths=None, ids=NONE):
    n = len(values)
    lengths = lengths or [1] * n
    return MicroBatch(
        input_ids=ids,
        target_positions=NONE,
        targets=NONE,
        weights=NONE,
        dataset_ids=NONE,
        segments=tuple(zip(np.cumsum([0, *lengths[:-1]]), lengths, range(n), strict=True)),
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
    return objective.metrics(sums.tolist(), batch), scores.grad.double()


def test_the_loss_of_rewards_is_that_of_bradley_and_terry_with_margin_and_centring():
    scores = DRAW.normal(0, 2, (12, 1)).astype(np.float32)
    margins = np.repeat(DRAW.random(6), 2)[:, None].astype(np.float32)
    objective = RewardModelling(["all"], ObjectiveSettings(objective="reward", center_rewards_coefficient=0.02))
    metrics, gradient = of_parts(objective, scores, margins, [2, 10], 6)
    y = torch.tensor(scores.astype(np.float64), requires_grad=True)
    good, bad = y[::2, 0], y[1::2, 0]
    chance = 1 / (1 + torch.exp(-(good - bad - torch.tensor(margins[::2, 0]))))
    loss = (-chance.log() + 0.02 * (good + bad) ** 2).mean()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert torch.allclose(gradient, y.grad, atol=2e-6)
    assert metrics["accuracy"] == (good > bad).double().mean().item()
    assert metrics["margin"] == pytest.approx((good - bad).mean().item())


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
    metrics, gradient = of_parts(objective, scores, values, [4], 9)
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
    _, details = objective.of_samples(objective.sample_values(torch.tensor(scores), micro_batch(values)).numpy())
    if several:
        assert details == {}
        return
    pairs = [("abc"[has], "abc"[given]) for has, given in zip(hot.argmax(1), found.argmax(1), strict=True)]
    confused = Counter(pair for pair in pairs if len({*pair}) == 2)
    assert {(has, given): count for has, given, count in details["confusions"]} == confused
    assert (counts := [count for *_, count in details["confusions"]]) == sorted(counts, reverse=True)


@pytest.mark.parametrize("num", [1, 3])
def test_regression_has_the_loss_of_transformers_and_the_correlations_of_pearson_and_spearman(num):
    scores, values = (DRAW.normal(2, 3, (11, num)).astype(np.float32) for _ in range(2))
    values[:4] = values[0]  # equal ranks
    settings = ObjectiveSettings(objective="classify", labels=list("abc")[:num], problem_type="regression")
    objective = build_objective(settings, ["all"])
    metrics, gradient = of_parts(objective, scores, values, [1, 4], 11)
    y, wanted = torch.tensor(scores, requires_grad=True), torch.tensor(values)
    config = SimpleNamespace(num_labels=num, problem_type="regression")
    loss = ForSequenceClassificationLoss(wanted, y, config)
    loss.backward()
    assert metrics == {"loss": pytest.approx(loss.item(), rel=1e-6)}
    assert loss.item() == pytest.approx(F.mse_loss(y, wanted).item())
    assert torch.allclose(gradient.float(), y.grad, atol=1e-6)
    seen = objective.sample_values(torch.tensor(scores), micro_batch(values)).numpy()
    found, details = objective.of_samples(seen)
    ranks = [[(each < one).sum() + (each == one).sum() / 2 for one in each] for each in seen.T]
    for name, columns in (("pearson", seen.T), ("spearman", ranks)):
        each = [np.corrcoef(columns[i], columns[num + i])[0, 1] for i in range(num)]
        assert found[name] == pytest.approx(np.mean(each), rel=1e-6), name
    assert details == {}
    for column, value in ((0, 0.1), (num, 0.1), (num, [np.nan, *seen[1:, num]])):  # numbers, then predictions
        odd = seen.copy()
        odd[:, column] = value
        assert all(np.isnan(each) for each in objective.of_samples(odd)[0].values())


# Texts of samples: an anchor, its positive, its negatives. Two have the same positive, which a third has as a negative;
# two have the same anchor; and the positives of the last two are each other's anchor.
ROWS = [(0, 1), (2, 1), (3, 4, 1), (5, 6), (5, 7, 8), (9, 10, 8), (11, 12), (12, 11)]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_gradients_of_embeddings_are_those_of_the_whole_batch_however_it_is_cut(monkeypatch, pooling):
    monkeypatch.setattr(of_texts, "_AT_ONCE", 3)
    num, dims, texts = len(ROWS), [16, 8], [text for row in ROWS for text in row]
    roles = [role for row in ROWS for role in range(len(row))]
    size = 1 if pooling == "last" else 3
    lengths = [1 + text % size for text in texts]
    ids = [[size * text + at for at in range(length)] for text, length in zip(texts, lengths, strict=True)]
    table = torch.tensor(DRAW.normal(0, 1, (13 * size, 32)), dtype=torch.float32)
    objective = Embedding(["all"], ObjectiveSettings(objective="embed", pooling=pooling, matryoshka_dims=dims))
    parts = []
    for start, end in ((0, 5), (5, 14), (14, len(roles))):
        of = roles[start:end], lengths[start:end], torch.tensor(np.concatenate(ids[start:end])[None])
        parts.append(micro_batch(np.zeros((end - start, 0)), *of))

    class Model(torch.nn.Module):
        def forward(self, input_ids, **_):
            return table[input_ids[0]]

    prepared = SimpleNamespace(accelerator=SimpleNamespace(device=torch.device("cpu")), model=Model(), ranks=Ranks())
    batch = GlobalBatch(parts, *[np.zeros(1)] * 3, 0.0, [], num_samples=num)
    gradients, sums = [], 0
    for part in objective.begin_step(prepared, batch).micro_batches:
        own = table[part.input_ids[0]].requires_grad_()
        (term,), numbers = objective.terms(own, part)
        gradients.append(torch.autograd.grad(term, own)[0])
        sums = sums + numbers

    y = table[np.concatenate(ids)].double().requires_grad_()
    vectors = torch.stack([part.mean(0) for part in y.split(lengths)])
    places = {role: [i for i, each in enumerate(roles) if each == role] for role in range(3)}
    loss = 0
    for size in (32, *dims):
        unit = vectors[:, :size] / vectors[:, :size].norm(dim=1, keepdim=True)
        for anchor, own in zip(places[0], places[1], strict=True):
            alike = {texts[anchor]} | {row[1] for row in ROWS if row[0] == texts[anchor]}
            others = [i for i in places[1] + places[2] if texts[i] not in alike]
            similarities = unit[[own, *others]] @ unit[anchor] / 0.05
            loss = loss + (similarities.logsumexp(0) - similarities[0]) / num
    loss.backward()
    assert objective.metrics(sums.tolist(), batch)["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert torch.allclose(torch.cat(gradients).double(), y.grad, rtol=1e-5, atol=2e-6)


def test_retrieval_is_that_of_a_sorted_list_of_documents():
    num, vectors = 40, torch.tensor(DRAW.normal(0, 1, (80, 4)))
    vectors[40:] += 0.5 * vectors[:40]
    roles, keys = torch.tensor([0] * num + [1] * num), torch.arange(80)
    keys[7] = keys[3]  # a question with two answers
    keys[79] = keys[5]  # an anchor, which is an answer too
    order = np.argsort(-(F.normalize(vectors[:40], dim=1) @ F.normalize(vectors[40:], dim=1).T).numpy(), axis=1)
    found = retrieval(Texts(vectors, roles, keys, 0))
    places = []
    for i in range(num):
        own = {3, 7} if i in (3, 7) else {i}
        found_at = [place for place, j in enumerate(j for j in order[i] if not (i == 5 and j == 39)) if j in own]
        places.append(found_at)
    assert found["mrr"] == pytest.approx(np.mean([1 / (1 + min(each)) for each in places]))
    assert found["recall_at_10"] == pytest.approx(np.mean([np.mean([at < 10 for at in each]) for each in places]))
    gains = 1 / np.log2(np.arange(2, 42))
    ideal = [sum(gains[at] for at in each if at < 10) / gains[: len(each)].sum() for each in places]
    assert found["ndcg_at_10"] == pytest.approx(np.mean(ideal))
    equal = retrieval(Texts(torch.ones(80, 4, dtype=torch.float64), roles, keys, 0))
    assert equal["mrr"] < 0.1  # equal embeddings find nothing
