"""Model and data are opened without weights and rows; the hub is asked only for what is there."""

import pytest

from kit.errors import Problem, UserError
from kit.strategy.strategies import FSDP2
from kit.tools.doctor import inputs
from kit.tools.doctor.inputs import OpenedModel, check_data, check_model_opens, check_wrap_class


def test_the_model_opens_with_its_adapters(recipe):
    opened = OpenedModel()
    lora = recipe.model_copy(update={"method": "lora"})
    assert check_model_opens(lora, opened).status == "ok"
    assert 0 < sum(p.numel() for p in opened.adapted.parameters() if p.requires_grad) < 200_000
    assert not any("lora" in name for name, _ in opened.meta_model.named_parameters())


def test_all_problems_of_a_model_are_reported(recipe):
    opened = OpenedModel()
    result = check_model_opens(recipe.model_copy(update={"max_length": 10**6}), opened)
    assert result.status == "fail" and "positions" in result.found and "--max_length" in result.fix
    assert opened.adapted is None and opened.meta_model is not None


def test_a_hub_model_that_is_not_in_the_cache_fails_offline(recipe, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"org/none.*not in the cache; HF_HUB_OFFLINE forbids"):
        check_model_opens(recipe.model_copy(update={"model_name_or_path": "org/none"}), OpenedModel())


@pytest.fixture
def meta_model(recipe):
    opened = OpenedModel()
    check_model_opens(recipe, opened)
    return opened.meta_model


def test_a_wrap_class_that_the_model_lacks_fails_with_those_it_has(meta_model, topology):
    fsdp = topology(strategy=FSDP2)
    assert check_wrap_class(fsdp, meta_model).found == "4 x LlamaDecoderLayer"
    result = check_wrap_class(topology(strategy=FSDP2, layer_classes=("QwenLayer",)), meta_model)
    assert result.status == "fail" and "no QwenLayer in this model; expected one of LlamaDecoderLayer" in result.found
    assert check_wrap_class(topology(layer_classes=("QwenLayer",)), meta_model).found == "nothing is sharded"


def test_local_data_asks_no_hub(recipe, monkeypatch):
    monkeypatch.setattr(inputs, "ask_hub", lambda name, flag, revision: pytest.fail("asked"))
    result = check_data(recipe, OpenedModel())
    assert result.status == "ok" and "train.jsonl" in result.found and "token" not in result.found
    nowhere = recipe.model_copy(update={"dataset": "nowhere.jsonl"})
    assert "no file or folder" in check_data(nowhere, OpenedModel()).found


def test_what_the_run_would_refuse_of_columns_rows_and_stop_tokens_fails(recipe, meta_model, tmp_path, monkeypatch):
    opened = OpenedModel(meta_model=meta_model)
    assert check_data(recipe, opened).status == "ok"
    data = tmp_path / "qa.jsonl"
    data.write_text('{"question": "a", "answer": "b"}\n')
    result = check_data(recipe.model_copy(update={"dataset": str(data)}), opened)
    assert result.status == "fail" and "--dataset_columns question=instruction,answer=output" in result.fix
    result = check_data(recipe.model_copy(update={"train_on": "all", "chat_template": "llama3"}), opened)
    assert result.status == "fail" and "--new_tokens" in result.fix
    seen = []
    problem = Problem("method", "an untrained token ends the answers", fix="--trainable_tokens '<|end|>'")
    monkeypatch.setattr(inputs, "check_stop_tokens", lambda *given: seen.append(given[3]) or [problem])
    result = check_data(recipe, opened)
    assert result.status == "fail" and "--trainable_tokens" in result.fix and len(seen[0]) == 1


def test_data_of_the_hub_are_asked_for_once_or_looked_for_in_the_cache(recipe, monkeypatch):
    remote = recipe.model_copy(update={"dataset": "org/data:main", "eval_dataset": None})
    asked = []
    monkeypatch.setattr(inputs.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(inputs, "ask_hub", lambda name, flag, revision: asked.append((name, flag)))
    monkeypatch.setattr(inputs, "get_token", lambda: None)
    assert check_data(remote, OpenedModel()).found.endswith("without a token") and asked == [("org/data", "dataset")]

    def gated(name, flag, revision):
        raise UserError(Problem(flag, f"{name}: its licence is not accepted", fix="log in: `hf auth login`"))

    monkeypatch.setattr(inputs, "ask_hub", gated)
    result = check_data(remote, OpenedModel())
    assert result.status == "fail" and "licence" in result.found and "hf auth login" in result.fix
    monkeypatch.setattr(inputs.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(inputs, "cached", lambda kind: ["org/other"])
    assert "not in the cache" in check_data(remote, OpenedModel()).found
    monkeypatch.setattr(inputs, "cached", lambda kind: ["org/data"])
    assert check_data(remote, OpenedModel()).status == "ok"


def test_data_must_hold_what_the_objective_learns_from(recipe, meta_model, tmp_path):
    pairs, rated = tmp_path / "pairs.jsonl", tmp_path / "rated.jsonl"
    pairs.write_text('{"prompt": "a:", "chosen": " b", "rejected": " c"}\n' * 3)
    rated.write_text('{"prompt": "a:", "completion": " b", "label": true}\n' * 3)
    opened = OpenedModel(meta_model=meta_model)
    for objective, right, wrong in (("dpo", pairs, rated), ("kto", rated, pairs)):
        asked = recipe.model_copy(update={"objective": objective, "eval_dataset": None})
        assert check_data(asked.model_copy(update={"dataset": str(right)}), opened).status == "ok"
        result = check_data(asked.model_copy(update={"dataset": str(wrong)}), opened)
        assert result.status == "fail" and f"--objective {'kto' if wrong == rated else 'dpo'}" in result.fix
    pairs.write_text('{"prompt": "a:", "chosen": " b", "rejected": " b"}\n')
    asked = recipe.model_copy(update={"objective": "dpo", "dataset": str(pairs), "eval_dataset": None})
    result = check_data(asked, opened)
    assert result.status == "fail" and "the same tokens as chosen" in result.found
