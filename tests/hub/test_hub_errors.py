"""Each way in which the hub says no has a message of its own, with what to do."""

from types import SimpleNamespace

import pytest
from huggingface_hub import errors

from kit.hub import hub_errors


def answer(kind, status, text="no"):
    return kind(text, response=SimpleNamespace(status_code=status, headers={}, request=None))


@pytest.mark.parametrize(
    ("error", "token", "words"),
    [
        (
            (errors.GatedRepoError, 403),
            "t",
            ["its licence is not accepted", "-> accept it at https://huggingface.co/a/b"],
        ),
        (
            (errors.GatedRepoError, 403, "Your request is awaiting a review"),
            "t",
            ["awaits an answer", "huggingface.co/a/b"],
        ),
        (
            (errors.RepositoryNotFoundError, 401),
            None,
            ["no folder 'a/b', and the hub has no such public model", "login"],
        ),
        ((errors.RevisionNotFoundError, 404), "t", ["model_revision: a/b has no such revision"]),
        ((errors.HfHubHTTPError, 401), "t", ["the hub refuses your token", "unset HF_TOKEN"]),
        ((errors.HfHubHTTPError, 503, "down"), "t", ["the hub refuses it (down)", "try again later"]),
    ],
)
def test_every_answer_has_its_message(monkeypatch, error, token, words):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    text = str(hub_errors.refusal(answer(*error), "no folder 'a/b'", "a/b", "model", "model_name_or_path"))
    for word in words:
        assert word in text


@pytest.fixture
def cache(tmp_path, monkeypatch):
    for name in ("models--meta-llama--Llama-3.1-8B", "models--gpt2", "datasets--openai--gsm8k"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(hub_errors.constants, "HF_HUB_CACHE", str(tmp_path))


def test_offline_it_is_said_what_the_cache_has(cache):
    assert hub_errors.cached("model") == ["gpt2", "meta-llama/Llama-3.1-8B"] and hub_errors.cached("dataset") == [
        "openai/gsm8k"
    ]
    near = str(hub_errors.not_cached("no folder", "meta-llama/Llama-3-8B", "model", "model_name_or_path"))
    assert "HF_HUB_OFFLINE forbids" in near and "did you mean 'meta-llama/Llama-3.1-8B'?" in near
    assert "the cache has gpt2, meta-llama" in str(
        hub_errors.not_cached("no folder", "x/y", "model", "model_name_or_path")
    )


def test_what_is_in_the_cache_can_be_used_where_there_is_no_network(cache):
    for name, fix in (("gpt2", "HF_HUB_OFFLINE=1 takes it from there"), ("x/y", "connect to a network")):
        problem = hub_errors.refusal(ConnectionError("no route"), "no folder", name, "model", "model_name_or_path")
        assert "the hub cannot be reached (no route)" in problem.found and fix in problem.fix


def test_only_what_is_gated_is_asked_for_twice(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.HfApi.auth_check", lambda self, name, repo_type: asked.append((name, repo_type))
    )
    hub_errors.check_access("a/b", "model", SimpleNamespace(gated=False))
    hub_errors.check_access("c/d", "dataset", SimpleNamespace(gated="manual"))
    assert asked == [("c/d", "dataset")]
