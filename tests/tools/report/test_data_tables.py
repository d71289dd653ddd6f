"""Tables about the data sets: the rows add up, and what nothing reads is listed."""

from data_helpers import open_all, pairs, write

from kit.tools.report.data_tables import datasets_table, unused_table


def test_the_rows_add_up(tmp_path, tokenizer):
    rows = [*pairs(30), {"prompt": 3, "completion": "b"}, "", {"prompt": "a " * 50, "completion": "b"}]
    write(tmp_path / "train.jsonl", *rows)
    data = open_all(tokenizer, on_bad_row="skip", max_length=40, eval_split_size=4)
    (row,) = datasets_table(data.train, data.evaluation)
    assert row["samples"] + row["held out"] + row["left out"] == row["rows"] == 31
    assert (row["skipped"], row["blank lines"], row["cut"], row["left out"]) == (1, 1, 1, 1)


def test_what_dedup_and_the_limits_leave_out_is_not_called_held_out(tmp_path, tokenizer):
    write(tmp_path / "train.jsonl", *pairs(20), *pairs(5))
    data = open_all(tokenizer, dedup=True, eval_split_size=4, max_train_samples=10, max_eval_samples=3)
    (row,) = datasets_table(data.train, data.evaluation)
    assert (row["rows"], row["samples"], row["held out"], row["unused"]) == (25, 10, 3, 12)


def test_what_nothing_reads_is_listed_with_its_share(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", *(row | {"url": "x"} for row in pairs(3)), *pairs(4)[3:])
    write(tmp_path / "b.jsonl", *pairs(2))
    train = open_all(tokenizer, dataset="a.jsonl,b.jsonl").train
    assert unused_table(train) == [{"data set": "a", "not used": "url", "share of rows": "75.0%"}]
