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


def test_repeats_are_found_across_data_sets_and_before_samples_are_held_out(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", *pairs(10))
    write(tmp_path / "b.jsonl", *pairs(8), *pairs(12)[10:])
    opened = open_all(tokenizer, dataset="a.jsonl,b.jsonl", dedup=True, eval_split_size=4)
    assert len(opened.train) + len(opened.evaluation) == 12
    assert not any("are in the training data" in note for note in opened.notes)
    write(tmp_path / "c.jsonl", *pairs(3))
    with pytest.raises(UserError, match="dedup: nothing of c is left to train on"):
        open_all(tokenizer, dataset="a.jsonl,c.jsonl", dedup=True)


def test_an_answer_with_another_label_is_no_repeat(tmp_path, tokenizer):
    row = {"prompt": "Hi ", "completion": "a", "label": True}
    write(tmp_path / "train.jsonl", row, row | {"label": False}, row, row | {"label": False})
    opened = open_all(tokenizer, objective="kto", dedup=True)
    assert opened.train.labels.tolist() == [True, False]


def test_rows_of_a_data_set_are_drawn_by_seed_and_leave_the_others_whole(tmp_path, tokenizer):
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", *pairs(20, name))

    def origins(limit, seed=0):
        opened = open_all(
            tokenizer, dataset=[{"path": "a.jsonl", "max_samples": limit}, {"path": "b.jsonl"}], seed=seed
        )
        return [opened.train.origin(i) for i in range(len(opened.train))], opened

    seven, opened = origins(7)
    of_a = [int(origin.split(":")[1]) for origin in seven if origin.startswith("a.jsonl")]
    assert len(of_a) == 7 and of_a == sorted(of_a) and of_a != list(range(1, 8)) and len(seven) == 27
    assert "a: 7 of 20 rows drawn by seed 0" in opened.notes
    assert origins(0.35)[0] == seven and origins(7, seed=1)[0] != seven
    everything = origins(50)[1]
    assert everything.fingerprint == origins(None)[1].fingerprint != opened.fingerprint
