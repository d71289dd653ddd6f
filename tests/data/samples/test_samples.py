"""Samples as a run sees them: a choice keeps origin and content, and what two sets share is counted."""

import numpy as np
from data_helpers import open_all, pairs, write


def both(tokenizer, **changes):
    """The samples of two files as one, and of each alone."""
    return [open_all(tokenizer, dataset=name, **changes).train for name in ("a.jsonl,b.jsonl", "a.jsonl", "b.jsonl")]


def as_lists(samples):
    return [(samples.origin(i), ids.tolist(), weights.tolist()) for i, (ids, weights) in enumerate(samples)]


def test_what_is_chosen_from_a_choice_keeps_its_content_and_counts(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", *pairs(6))
    write(tmp_path / "b.jsonl", *pairs(6, "b"))
    joint, _, _ = both(tokenizer)
    chosen = joint.select(np.array([9, 2, 7, 0]), "first").select(np.array([3, 0]), "second")
    assert as_lists(chosen) == [as_lists(joint)[0], as_lists(joint)[9]]
    assert chosen.dataset_ids.tolist() == [0, 1]
    assert chosen.lengths.tolist() == [len(ids) for ids, _ in chosen]
    assert chosen.target_weights.tolist() == [weights[1:].sum() for _, weights in chosen]
    assert chosen.report == {
        "num_samples": 2,
        "num_tokens": chosen.lengths.sum(),
        "num_supervised_tokens": sum((weights[1:] > 0).sum() for _, weights in chosen),
    }
