"""What is stored of a teacher is its own, computed once, and teaches what the equations over K + 1 outcomes say."""

import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from data_helpers import open_recipe_data, pairs, write
from helpers import actual_strategy

from kit.config.recipe import Recipe
from kit.data.feed.batches import Collator
from kit.data.feed.data_ranks import Ranks
from kit.model.build import build_teacher, open_config
from kit.model.load_plan import LoadPlan
from kit.model.pretrained.tokenizer import open_tokenizer
from kit.model.teacher import teacher_settings
from kit.strategy.accelerator import Prepared
from kit.system.cache import cache_folder
from kit.system.errors import TrainingError
from kit.tasks.distil import stored_teacher
from kit.tasks.distil.loss import divergence
from kit.tasks.distil.stored_teacher import StoredTeacher, outcomes, store_teacher
from kit.tasks.distil.teacher import Teacher

KINDS = ("forward_kl", "reverse_kl", "jsd")
DRAW = np.random.default_rng(0)
STUDENT, TEACHER = (torch.tensor(DRAW.normal(0, 3, (6, 11))) for _ in range(2))


def by_the_paper(kind, p, q, beta):
    m = beta * p + (1 - beta) * q
    pairs = {"forward_kl": [(1, p, q)], "reverse_kl": [(1, q, p)], "jsd": [(beta, p, m), (1 - beta, q, m)]}[kind]
    return sum(share * torch.where(a > 0, a * (a / b).log(), 0).sum(dim=1) for share, a, b in pairs)


def folded(probabilities, ids):
    """Probabilities of the tokens ``ids``, and the sum of all others."""
    named = probabilities.gather(1, ids)
    return torch.cat([named, 1 - named.sum(dim=1, keepdim=True)], dim=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", [0, 3, -2])
def test_a_divergence_over_the_most_probable_tokens_is_that_of_the_equation_and_never_larger(kind, padding):
    """With tables that are padded on either side."""
    size, t, beta, k = min(11, 11 + padding), 2.0, 0.3, 4
    of_teacher = torch.nn.functional.pad(TEACHER, (0, max(0, padding)), value=9.0)[:, : 11 + padding]
    ids = (of_teacher[:, :size] / t).topk(k).indices
    known = SimpleNamespace(
        per_target={
            "teacher_ids": ids.int(),
            "teacher_logps": outcomes(of_teacher[:, :size].float(), ids, t),
        }
    )
    logits = STUDENT.float().requires_grad_()
    p, q, agrees = StoredTeacher(k, size, None).compare(known, logits, slice(0, 6), t)
    value = divergence(p, q, kind, beta)
    value.sum().backward()
    expected = STUDENT.clone().requires_grad_()
    whole = [(each[:, :size] / t).softmax(dim=1) for each in (of_teacher, expected)]
    wanted = by_the_paper(kind, *(folded(each, ids) for each in whole), beta)
    wanted.sum().backward()
    assert torch.allclose(value.double(), wanted, rtol=1e-6, atol=1e-7)
    assert torch.allclose(logits.grad.double(), expected.grad, atol=2e-6)
    assert (wanted <= by_the_paper(kind, *whole, beta) + 1e-12).all()
    assert torch.equal(agrees, of_teacher[:, :size].argmax(dim=1) == STUDENT[:, :size].argmax(dim=1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rest_that_rounding_would_lose_keeps_its_value_and_its_gradient(kind):
    """Of 1e-9 and 1e-8, beside tokens whose probabilities are 1 together in float32."""
    teacher, student = (torch.tensor([[0.0, 0.5, -19.0, rest]]) for rest in (-20.0, -17.5))
    ids = torch.tensor([[0, 1]])
    logits = student.clone().requires_grad_()
    value = divergence(outcomes(teacher, ids, 1.0), outcomes(logits, ids, 1.0), kind)
    value.sum().backward()
    expected = student.double().requires_grad_()
    p, q = (each.double().softmax(dim=1) for each in (teacher, expected))
    p, q = (torch.cat([each[:, :2], each[:, 2:].sum(dim=1, keepdim=True)], dim=1) for each in (p, q))
    by_the_paper(kind, p, q, 0.5).sum().backward()
    assert torch.allclose(logits.grad[:, 2:].double(), expected.grad[:, 2:], rtol=1e-3, atol=0)


@pytest.fixture
def store(model_folder, tmp_path, monkeypatch):
    """A function of settings that stores a teacher, which is the model itself, and counts the calls of it."""
    monkeypatch.setenv("KIT_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "answers.jsonl", *pairs(11))
    plain = {"model_name_or_path": str(model_folder), "teacher": str(model_folder), "objective": "distil"}
    plain |= {"dataset": str(tmp_path / "answers.jsonl"), "max_length": 128, "global_batch_size": 3, "method": "full"}

    def store(total_steps=9, spoil=None, **changes):
        recipe = Recipe(**plain | {"teacher_top_k": 5} | changes)
        tokenizer = open_tokenizer(recipe)
        data = open_recipe_data(recipe, tokenizer, 320)
        accelerator = Accelerator(cpu=True)
        settings = teacher_settings(recipe)
        config = open_config(settings)
        build = partial(
            build_teacher, settings, config, LoadPlan(compute_dtype="float32", device="cpu"), recipe.packing
        )
        calls, opened = [], []

        def open_teacher(*_):
            model = build()
            opened.append(weakref.ref(model))
            model.register_forward_hook(lambda *_: calls.append(1))
            if spoil:
                spoil(model)
            return Teacher(Prepared(accelerator, Ranks(), model, None, actual_strategy(sharded_layers=None)))

        monkeypatch.setattr(stored_teacher, "open_teacher", open_teacher)
        checked = SimpleNamespace(recipe=recipe, teacher_config=config, data=data, tokenizer=tokenizer)
        checked.total_steps, checked.vocab_size = total_steps, 320
        stored = store_teacher(
            SimpleNamespace(checked=checked, accelerator=accelerator, progress=lambda items, *_: items)
        )
        assert all(model() is None for model in opened), "the teacher is still there"
        return SimpleNamespace(stored=stored, samples=data.train, num_calls=len(calls), model=build())

    return store


def entries():
    return sorted(path for path in (cache_folder() / stored_teacher.FOLDER).iterdir() if path.is_dir())


def logits_of_targets(run, i):
    """Those of the model's own forward pass at the targets of sample ``i``, float32 [S, V]."""
    ids, weights = run.samples[i]
    with torch.no_grad():
        logits = run.model(input_ids=torch.tensor(ids[None].astype(np.int64))).logits[0]
    return logits[torch.from_numpy(np.flatnonzero(weights[1:]))]


@pytest.mark.parametrize("packing", [False, True])
def test_a_micro_batch_gets_the_most_probable_tokens_of_its_own_targets(store, monkeypatch, packing):
    monkeypatch.setattr(stored_teacher, "BLOCK_VALUES", 5 * 30)
    run = store(packing=packing)
    assert len(entries()) > 2
    collator = Collator(2, 0, packing, 128)
    for rows in ([[4, 2], [0]], [[7], [3]], []):
        items = [np.array(row) for row in rows] if packing else [np.array([i]) for row in rows for i in row]
        micro_batch = collator.collate(run.samples, items)
        ids, logps = micro_batch.per_target["teacher_ids"], micro_batch.per_target["teacher_logps"]
        assert (ids.shape, logps.shape) == ((len(micro_batch.targets), 5), (len(micro_batch.targets), 6))
        if rows:
            whole = torch.cat([logits_of_targets(run, i) for row in rows for i in row]).log_softmax(dim=1)
            assert torch.equal(ids.long(), whole.topk(5).indices)
            assert torch.allclose(logps[:, :5], whole.topk(5).values, atol=1e-5)
            assert torch.allclose(logps.exp().sum(dim=1), torch.ones(len(ids)), atol=1e-5)


def test_it_is_computed_once_and_what_changes_the_numbers_is_in_the_key(store):
    first = store()
    assert first.num_calls == 11 and store(learning_rate=1e-3, seed=1, divergence="jsd").num_calls == 0
    for change in ({"distil_temperature": 2.0}, {"teacher_top_k": 6}, {"max_length": 64}, {"total_steps": 1}):
        assert store(**change).num_calls > 0, change
    assert store(total_steps=1).num_calls == 0


def test_a_pass_that_was_stopped_goes_on_with_its_next_block(store, monkeypatch):
    monkeypatch.setattr(stored_teacher, "BLOCK_VALUES", 5 * 30)
    whole = store()
    blocks = entries()
    changed = {"distil_temperature": 3.0}
    writing = stored_teacher.store

    def stopped(*args):
        if len(entries()) == len(blocks) + 2:
            raise KeyboardInterrupt
        writing(*args)

    monkeypatch.setattr(stored_teacher, "store", stopped)
    with pytest.raises(KeyboardInterrupt):
        store(**changed)
    monkeypatch.setattr(stored_teacher, "store", writing)
    again = store(**changed)
    assert 0 < again.num_calls < whole.num_calls and len(entries()) == 2 * len(blocks)


def test_a_vocabulary_smaller_than_k_is_stored_whole(store):
    run = store(teacher_top_k=1000)
    assert run.stored.num_tokens == 320 and run.stored.first_logps.shape[1] == 320
    logps = run.samples.per_target(np.array([3]))["teacher_logps"]
    whole = logits_of_targets(run, 3).log_softmax(dim=1)
    assert torch.allclose(torch.from_numpy(logps), whole.topk(320).values, atol=1e-5)


def test_a_teacher_that_gives_no_numbers_is_named_with_the_sample(store):
    with pytest.raises(TrainingError, match=r"are NaN, first in .*answers.jsonl:\d+"):
        store(spoil=lambda model: model.lm_head.weight.data.fill_(float("nan")))
    assert not list(cache_folder().glob(f"{stored_teacher.FOLDER}/*/"))
