"""Parts of the data: repeats are left out once and for all, and by what is learned, not by the text."""

import pytest
from data_helpers import open_all, pairs, write

from kit.errors import UserError

pytestmark = pytest.mark.usefixtures("own_folder")


def test_samples_with_the_same_tokens_and_mask_are_left_out(tmp_path, tokenizer):
    ids = [5, 6, 7, 8]
    rows = [
        {"input_ids": ids, "labels": ids},
        {"input_ids": ids, "labels": [-100, -100, 7, 8]},  # another mask: another sample
        {"input_ids": [5, 6, 7], "labels": [5, 6, 7]},
        {"input_ids": ids, "labels": ids},
        {"input_ids": ids, "labels": [-100, -100, 7, 8]},
        {"input_ids": ids, "labels": ids},
    ]
    write(tmp_path / "train.jsonl", *rows)
    opened = open_all(tokenizer, dedup=True)
    assert [opened.train.origin(i) for i in range(len(opened.train))] == [f"train.jsonl:{i}" for i in (1, 2, 3)]
    assert "dedup: 3 of 6 samples left out: an earlier one has the same tokens and mask" in opened.notes
    assert opened.fingerprint != open_all(tokenizer).fingerprint


def test_data_without_repeats_is_the_same_data_with_dedup(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *pairs(9))
    assert open_all(tokenizer, dedup=True).fingerprint == open_all(tokenizer).fingerprint


def test_repeats_are_found_across_data_sets_and_before_samples_are_held_out(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", *pairs(10))
    write(tmp_path / "b.jsonl", *pairs(8), *pairs(12)[10:])
    opened = open_all(tokenizer, dataset="a.jsonl,b.jsonl", dedup=True, eval_split_size=4)
    assert len(opened.train) + len(opened.evaluation) == 12
    assert not any("are in the training data" in note for note in opened.notes)
    write(tmp_path / "c.jsonl", *pairs(3))
    with pytest.raises(UserError, match="dedup: all samples of c are in the data sets before it"):
        open_all(tokenizer, dataset="a.jsonl,c.jsonl", dedup=True)
