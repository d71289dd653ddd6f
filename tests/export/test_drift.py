"""How far a merged model answers from the trained one is a number with its unit, and what it was measured on."""

import math
from types import SimpleNamespace

import pytest
import torch
from data_helpers import chat, write

from kit.config.recipe import Recipe
from kit.export.drift import (
    MAX_TOKENS,
    NUM_SEQUENCES,
    Trained,
    describe_drift,
    drift_between,
    find_sequences,
    logits_of,
)


def test_drift_is_the_mean_divergence_from_the_trained_model_and_the_largest_difference():
    trained = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log() + 3  # a shift of all logits says the same
    merged = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log() + 3
    drift = drift_between(trained, merged)
    assert drift.mean_kl == pytest.approx((0.75 * math.log(1.5) + 0.25 * math.log(0.5)) / 2, rel=1e-6)
    assert drift.max_difference == pytest.approx(math.log(2), rel=1e-6) and drift.num_positions == 2


class Echo(torch.nn.Module):
    """Says with certainty that the same token comes next; with dropout on it says nothing."""

    dtype = torch.bfloat16

    def forward(self, input_ids):
        assert not self.training
        return SimpleNamespace(logits=torch.nn.functional.one_hot(input_ids, 5).to(self.dtype) * 100)


def test_there_are_logits_after_each_token_of_each_sequence():
    logits = logits_of(Echo(), [torch.tensor([1, 2]), torch.tensor([3])])
    assert logits.dtype == torch.float32 and logits.argmax(-1).tolist() == [1, 2, 3]


def test_the_description_has_the_drift_and_what_it_was_measured_on():
    sequences = [torch.tensor([1, 2])]
    trained = Trained(logits_of(Echo(), sequences), sequences, "two tokens", "adapter")
    text = describe_drift(trained, Echo())
    assert "the trained model (adapter) to the merged one (computed in bfloat16)" in text
    assert "KL(trained || merged) 0 nats per token, the mean over 2 positions" in text
    assert text.endswith("measured on two tokens")


def test_drift_is_measured_on_evaluation_samples_or_on_random_tokens_if_these_are_gone(model_folder, tmp_path):
    write(tmp_path / "eval.jsonl", *(chat(f"red {i}", "blue " * 300) for i in range(NUM_SEQUENCES + 1)))
    write(tmp_path / "train.jsonl", chat("red", "blue"))
    settings = {"model_name_or_path": str(model_folder), "dataset": str(tmp_path / "train.jsonl"), "max_length": 512}
    opener = Recipe(**settings)
    sequences, source = find_sequences(opener, Recipe(**settings, eval_dataset=str(tmp_path / "eval.jsonl")))
    assert [len(ids) for ids in sequences] == [MAX_TOKENS] * NUM_SEQUENCES and "evaluation samples" in source
    for run in (opener, Recipe(**settings, eval_dataset=str(tmp_path / "gone.jsonl"))):
        sequences, source = find_sequences(opener, run)
        again, _ = find_sequences(opener, run)
        assert all(torch.equal(one, other) for one, other in zip(sequences, again, strict=True))
        assert len(sequences) == NUM_SEQUENCES and "random tokens" in source
