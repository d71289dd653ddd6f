"""Parts of the data: rows drawn of one dataset."""

from data_helpers import open_all, pairs, write


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
