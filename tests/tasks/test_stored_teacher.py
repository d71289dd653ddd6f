"""What is stored of a teacher is its own, computed once, and teaches what the equations over K + 1 outcomes say."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from data_helpers import open_recipe_data, pairs, write
from fake_vllm import FakeVllm
from helpers import actual_strategy, free_port, make_model

from kit.config.recipe import Recipe
from kit.data.feed.batches import Collator
from kit.data.feed.data_ranks import Ranks
from kit.model.build import build_teacher, open_config
from kit.model.load_plan import LoadPlan
from kit.model.pretrained.tokenizer import open_tokenizer
from kit.model.teacher import teacher_settings
from kit.strategy.accelerator import Prepared
from kit.system.cache import cache_folder
from kit.system.errors import TrainingError, UserError
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

    def store(total_steps=9, spoil=None, entries=(), **changes):
        if entries:
            changes["dataset"] = [{"path": str(tmp_path / "answers.jsonl")} | entry for entry in entries]
        recipe = Recipe(**plain | {"teacher_top_k": 5} | changes)
        tokenizer = open_tokenizer(recipe)
        data = open_recipe_data(recipe, tokenizer, 320)
        accelerator = Accelerator(cpu=True)
        calls, opened = [], []

        def build(own):
            settings = teacher_settings(own)
            plan = LoadPlan(compute_dtype="float32", device="cpu")
            return build_teacher(settings, open_config(settings), plan, own.packing)

        def open_teacher(_, own):
            model = build(own)
            opened.append(weakref.ref(model))
            model.register_forward_hook(lambda *_: calls.append(1))
            if spoil:
                spoil(model)
            return Teacher(Prepared(accelerator, Ranks(), model, None, actual_strategy(sharded_layers=None)))

        monkeypatch.setattr(stored_teacher, "open_teacher", open_teacher)
        checked = SimpleNamespace(recipe=recipe, data=data, tokenizer=tokenizer)
        checked.total_steps, checked.vocab_size = total_steps, 320
        stored = store_teacher(
            SimpleNamespace(checked=checked, accelerator=accelerator, progress=lambda items, *_: items)
        )
        assert all(model() is None for model in opened), "the teacher is still there"
        return SimpleNamespace(stored=stored, samples=data.train, num_calls=len(calls), model=build(recipe))

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
    assert run.stored.num_tokens == 320 and run.stored.first_logps[0].shape[1] == 320
    logps = run.samples.per_target(np.array([3]))["teacher_logps"]
    whole = logits_of_targets(run, 3).log_softmax(dim=1)
    assert torch.allclose(torch.from_numpy(logps), whole.topk(320).values, atol=1e-5)


def test_a_teacher_that_gives_no_numbers_is_named_with_the_sample(store):
    with pytest.raises(TrainingError, match=r"are NaN, first in .*answers.jsonl:\d+"):
        store(spoil=lambda model: model.lm_head.weight.data.fill_(float("nan")))
    assert not list(cache_folder().glob(f"{stored_teacher.FOLDER}/*/"))


@pytest.fixture
def served(model_folder, request):
    """Start a server of the model with the arguments of ``FakeVllm``, and return it with the settings that name it."""

    def start(**changes):
        server = FakeVllm(model_folder, **changes)
        request.addfinalizer(server.close)
        return server, {"teacher_server": server.url, "vllm_server_timeout": 20}

    return start


def all_targets(run):
    return run.samples.per_target(np.arange(len(run.samples)))


def test_a_served_teacher_gives_what_the_stored_one_gives_also_after_its_server_went(store, served):
    own = all_targets(store())
    server, settings = served(loses_at=4, away_seconds=0.5)
    run = store(**settings)
    found = all_targets(run)
    assert run.num_calls == 0 and np.array_equal(found["teacher_ids"], own["teacher_ids"])
    assert np.allclose(found["teacher_logps"], own["teacher_logps"], atol=1e-5)
    asked = [tuple(body["prompt"]) for path, body in server.requests if path == "/v1/completions"]
    # At most those of one moment are asked again, and the longest sample proves each start of the server.
    assert set(asked) == {tuple(run.samples[i][0].tolist()) for i in range(11)} and len(asked) <= 2 * 11 + 2
    num = len(server.requests)
    store(**settings | {"teacher_server": "http://127.0.0.1:9"})
    assert len(server.requests) == num, "the cache has all, and needs no server"


def test_a_pass_over_a_server_that_was_stopped_asks_for_its_next_block(store, served, monkeypatch):
    monkeypatch.setattr(stored_teacher, "SERVED_VALUES", 5 * 30)
    server, settings = served()
    writing = stored_teacher.store

    def stopped(*args):
        writing(*args)
        if len(entries()) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(stored_teacher, "store", stopped)
    with pytest.raises(KeyboardInterrupt):
        store(**settings)
    monkeypatch.setattr(stored_teacher, "store", writing)
    num = sum("max_tokens" in body for _, body in server.requests)
    run = store(**settings)
    assert sum("max_tokens" in body for _, body in server.requests) == 11 + 2 and num > 3
    assert np.array_equal(all_targets(run)["teacher_ids"], all_targets(store())["teacher_ids"])


def test_a_server_that_is_not_the_teacher_is_refused_before_the_first_sample(store, served, model_folder, monkeypatch):
    def refused(words, settings, **changes):
        with pytest.raises(UserError, match=words) as raised:
            store(**settings | changes)
        assert "teacher_server" in str(raised.value)

    gone = {"teacher_server": f"http://127.0.0.1:{free_port()}", "vllm_server_timeout": 0.1}
    refused("does not answer, for 0.1 s", gone)
    refused("The model `other` does not exist", served()[1], teacher="other")
    refused(r"greater than max allowed: 4[^>]*\n *-> vllm serve [^ ]+ --max-logprobs 5", served(max_logprobs=4)[1])
    refused(r"longer than the maximum[^>]*\n *-> .*--max-model-len \d+$", served(max_model_len=20)[1])
    server, settings = served()
    server.tokenizer.add_tokens([" fish"])
    refused("/tokenize: gives .* other ids than", settings)
    server, settings = served()
    plain = server.reply

    def with_logprobs(change):
        def reply(path, body):
            status, content = plain(path, body)
            for each in content["choices"][0]["prompt_logprobs"][1:] if "choices" in content else ():
                change(each)
            return status, content

        return reply

    for change in (
        lambda each: each.update({"320": {"logprob": -0.1}}),
        lambda each: each.update({"-1": {"logprob": -0.1}}),
        lambda each: [value.update(logprob=value["logprob"] + 9) for value in each.values()],
        lambda each: each.popitem() if len(each) == 5 else [each.popitem(), each.popitem()],
        lambda each: [value.update(logprob=float("nan")) for value in each.values()],
        lambda each: [value.update(logprob="x") for value in each.values()],
    ):
        monkeypatch.setattr(server, "reply", with_logprobs(change))
        refused("/v1/completions: ", settings)


def test_datasets_with_teachers_of_their_own_get_what_a_run_with_each_gets(store, served, tmp_path):
    other = make_model(tmp_path / "other", num_hidden_layers=1)
    _, settings = served()
    alone = [all_targets(store(**changes)) for changes in ({}, {"teacher": str(other)})]
    served_one = {"name": "c", "teacher_server": settings["teacher_server"]}
    run = store(50, entries=[{"name": "a"}, {"name": "b", "teacher": str(other)}, served_one])
    assert len(entries()) == 2 + 3 and run.stored.description.count("%") == 3
    for name, found in all_targets(run).items():
        for part, own in zip(np.split(found, 3), (alone[0], alone[1], alone[0]), strict=True):
            assert np.allclose(part, own[name], atol=1e-5), name
