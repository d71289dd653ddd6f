"""Each divergence is the equation of its paper, over the whole vocabulary, whatever the sizes of the two tables are."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kit.config.recipe import Recipe
from kit.config.settings.objective import ObjectiveSettings
from kit.data.feed.batches import MicroBatch
from kit.model.pretrained.tokenizer import open_tokenizer
from kit.model.teacher import check_teacher
from kit.system.errors import UserError
from kit.tasks.distil.loss import METRICS, Distillation, divergence
from kit.tasks.distil.teacher import Teacher

DRAW = np.random.default_rng(0)
STUDENT = DRAW.normal(0, 2, (6, 11))
TEACHER = DRAW.normal(0, 2, (6, 11))
TARGETS = torch.tensor([3, 0, 10, 2, 2, 7])
WEIGHTS = torch.tensor([1.0, 1.0, 0.5, 2.0, 1.0, 1.0])


def by_the_paper(kind, student, teacher, temperature=1.0, beta=0.5):
    """The divergence of each row, float64, written with probabilities."""
    p, q = (torch.softmax(each.double() / temperature, dim=1) for each in (teacher, student))
    m = beta * p + (1 - beta) * q
    kl = {"forward_kl": (p, q), "reverse_kl": (q, p)}
    pairs = [(1.0, *kl[kind])] if kind in kl else [(beta, p, m), (1 - beta, q, m)]
    return sum(share * (a * (a / b).log()).sum(dim=1) for share, a, b in pairs)


def micro_batch(rows):
    n = len(TARGETS[rows])
    return MicroBatch(
        input_ids=TARGETS[rows][None],
        target_positions=torch.arange(n),
        targets=TARGETS[rows],
        weights=WEIGHTS[rows],
        dataset_ids=torch.zeros(n, dtype=torch.int64),
        segments=((0, n, 0),),
    )


class Known(Teacher):
    """A teacher with these logits, float32 [S, V]."""

    def __init__(self, logits):
        self._known = torch.as_tensor(logits, dtype=torch.float32)

    def logits(self, micro_batch, rows):
        return self._known[rows]


def objective(logits, **settings):
    return Distillation(["all"], ObjectiveSettings(objective="distil", teacher="x", **settings), Known(logits))


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("padding", [0, 3, -2])
def test_losses_and_gradients_are_those_of_the_equations(kind, padding):
    teacher = np.pad(TEACHER, ((0, 0), (0, max(0, padding))), constant_values=5.0)[:, : 11 + padding]
    size = min(11, teacher.shape[1])
    beta = {"beta": 0.3} if kind == "jsd" else {}
    of_kit = objective(teacher, divergence=kind, distil_temperature=2.0, cross_entropy_weight=0.25, **beta)
    expected = torch.tensor(STUDENT, requires_grad=True)
    distances = by_the_paper(kind, expected[:, :size], torch.tensor(teacher[:, :size]), 2.0, 0.3)
    entropy = torch.nn.functional.cross_entropy(expected, TARGETS, reduction="none")
    whole = ((0.25 * entropy + 0.75 * 4 * distances) * WEIGHTS).sum() / WEIGHTS.sum()
    whole.backward()
    logits = torch.tensor(STUDENT, dtype=torch.float32, requires_grad=True)
    batch = SimpleNamespace(target_weights=np.array([float(WEIGHTS.sum())]))
    (divisor,) = of_kit.divisors(batch)
    sums = 0
    for rows in (slice(0, 4), slice(4, 6)):  # as two micro-batches, the second one in one chunk with the first's rows
        part = micro_batch(slice(0, 6))
        values = of_kit.target_values(part, logits[rows], rows)
        (term,), numbers = of_kit.terms(values, micro_batch(rows))
        (term / divisor).backward()
        sums = sums + numbers
    metrics = of_kit.metrics(sums.tolist(), batch)
    assert metrics["loss"] == pytest.approx(whole.item(), rel=1e-6)
    assert torch.allclose(logits.grad.double(), expected.grad, atol=2e-6)
    assert metrics["divergence"] == pytest.approx(((distances * WEIGHTS).sum() / WEIGHTS.sum()).item(), rel=1e-6)
    assert metrics["cross_entropy"] == pytest.approx(((entropy * WEIGHTS).sum() / WEIGHTS.sum()).item(), rel=1e-6)
    agrees = torch.tensor(STUDENT[:, :size].argmax(1) == teacher[:, :size].argmax(1)).double()
    assert metrics["teacher_agreement"] == pytest.approx((agrees @ WEIGHTS.double() / WEIGHTS.sum()).item())
    assert set(METRICS) <= set(metrics)


@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
def test_a_token_that_the_teacher_rules_out_counts_nothing(kind):
    teacher = torch.tensor(TEACHER)
    teacher[:, 4] = -torch.inf
    q = torch.tensor(STUDENT, requires_grad=True)
    value = divergence(teacher.log_softmax(1), q.log_softmax(1), kind)
    value.sum().backward()
    assert value.isfinite().all() and q.grad.isfinite().all()
    rest = [i for i in range(11) if i != 4]
    p, whole = teacher[:, rest].softmax(1), q.detach().softmax(1)
    if kind == "forward_kl":
        expected = (p * (p / whole[:, rest]).log()).sum(1)
    else:
        m = (p + whole[:, rest]) / 2
        of_q = (whole[:, rest] * (whole[:, rest] / m).log()).sum(1) + whole[:, 4] * np.log(2)
        expected = ((p * (p / m).log()).sum(1) + of_q) / 2
    assert torch.allclose(value, expected)


def test_a_token_that_the_student_alone_has_added_is_refused(model_folder):
    """The data may hold it, and the teacher has no such row."""
    names = {"model_name_or_path": str(model_folder), "teacher": str(model_folder), "dataset": "unused"}
    recipe = Recipe(**names, objective="distil", max_length=64)
    tokenizer = open_tokenizer(recipe)
    check_teacher(recipe, tokenizer)
    tokenizer.add_tokens(["<tool>"])
    with pytest.raises(UserError, match=r"teacher: .* gives '<tool>' other ids"):
        check_teacher(recipe, tokenizer)
