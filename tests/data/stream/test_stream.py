"""Streams: the same samples in the same steps on every topology, and after every stop."""

import json

import numpy as np
import pytest
from data_helpers import open_all, preference_pairs, recipe, write

from kit.data.feed.data_ranks import Ranks
from kit.system.errors import UserError

BATCH = 8


def make_files(folder, num_files, rows_each=100):
    rng = np.random.default_rng(0)
    for f in range(num_files):
        rows = [
            {"prompt": f"file {f} row {i} ", "completion": "a " * int(rng.integers(1, 30))} for i in range(rows_each)
        ]
        write(folder / f"part-{f}.jsonl", *rows)


def flags(**changes):
    return {
        "dataset": "part-*.jsonl",
        "streaming": True,
        "max_steps": 100,
        "global_batch_size": BATCH,
        "shuffle_buffer_size": 40,
        "max_length": 128,
        **changes,
    }


def feeds(tokenizer, world, size, state=None, ranks=None, **changes):
    settings = flags(per_device_train_batch_size=size, **changes)
    opened = open_all(tokenizer, **settings)
    return [
        opened.open_feed(recipe(**settings), ranks or Ranks(rank, world), 0, state or {}, settings.get("output_dir"))
        for rank in range(world)
    ]


def samples(batches):
    """The tokens of each sample in micro-batches, by the number that seeds its noise."""
    found = {}
    for batch in batches:
        ids = batch.input_ids.flatten()
        for start, size, number in batch.segments:  # of a pair there are two
            found.setdefault(number, []).append(ids[start : start + size].tolist())
    return found


def taken(ranks, steps):
    """Of each step the origins of its samples, which all ranks know, and the samples that they compute together."""
    found = []
    for step in steps:
        batches = [feed.take(step) for feed in ranks]
        assert all(batch.origins == batches[0].origins for batch in batches)
        parts = [samples(batch.micro_batches) for batch in batches]
        together = {number: ids for part in parts for number, ids in part.items()}
        assert len(together) == sum(map(len, parts)) == batches[0].num_samples
        found.append((batches[0].origins, dict(sorted(together.items()))))
    return found


def origins(ranks, steps):
    return [found for found, _ in taken(ranks, steps)]


MIX = "[{path: part-0.jsonl, weight: 3}, {path: 'part-[12].jsonl', weight: 1}]"


# The reference of dpo is here the model without its adapter.
@pytest.mark.parametrize("objective", [{}, {"objective": "dpo", "method": "lora"}])
@pytest.mark.parametrize("packing", [False, True])
def test_every_topology_reads_the_same_steps_and_goes_on_where_another_stopped(packing, objective, tmp_path, tokenizer):
    make_files(tmp_path, 3)
    if objective:
        for f in range(3):
            write(tmp_path / f"part-{f}.jsonl", *preference_pairs(100, f"{f}"))
    flags = {"packing": packing, "dataset": MIX, **objective}
    whole = taken(feeds(tokenizer, 1, 8, **flags), range(50))
    before = feeds(tokenizer, 2, 4, **flags)
    assert taken(before, range(23)) == whole[:23]
    state = json.loads(json.dumps(before[0].state()))
    for shape in [(2, 2), (8, 1)]:
        assert taken(feeds(tokenizer, *shape, state, **flags), range(23, 50)) == whole[23:]
    share = np.mean([origin.startswith("part-0") for found, _ in whole for origin in found])
    assert 0.7 < share < 0.8


def test_an_epoch_has_every_row_once_and_another_order(tmp_path, tokenizer):
    make_files(tmp_path, 4, rows_each=40)
    steps = origins(feeds(tokenizer, 1, 8), range(40))
    seen = [origin for step in steps for origin in step]
    assert sorted(seen[:160]) == sorted(f"part-{f}.jsonl:{i + 1}" for f in range(4) for i in range(40))
    assert sorted(seen[160:]) == sorted(seen[:160]) and seen[160:] != seen[:160]
    assert seen[:40] != sorted(seen[:40])


def test_a_stream_shorter_than_a_batch_still_fills_it(tmp_path, tokenizer):
    make_files(tmp_path, 1, rows_each=3)
    (feed,) = feeds(tokenizer, 1, 8)
    assert [len(feed.take(step).origins) for step in range(5)] == [8] * 5


def test_a_state_that_does_not_belong_to_the_stream_is_refused(tmp_path, tokenizer):
    make_files(tmp_path, 1)
    for cursors in ([["x"]], [[0, 0, 0]] * 2):
        with pytest.raises(UserError, match="the checkpoint does not match this stream"):
            feeds(tokenizer, 1, 8, {"cursors": cursors})


def test_a_later_bad_row_is_skipped_and_listed_once_or_ends_the_run(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("kit.data.read.blocks.BLOCK_BYTES", 5000)  # the first block is checked before the run
    make_files(tmp_path, 1, 300)
    with (tmp_path / "part-0.jsonl").open("a") as file:
        file.write('{"prompt": "a"}\n')
    (tmp_path / "out").mkdir()
    for on_bad_row in (None, "skip"):
        (feed,) = feeds(tokenizer, 1, 8, on_bad_row=on_bad_row, output_dir="out")
        for step in range(80):  # two epochs
            feed.take(step)
        (line,) = (tmp_path / "out/skipped_rows.jsonl").read_text().splitlines()
        row = json.loads(line)
        assert row["row"] == "part-0.jsonl:301" and "no 'completion'" in row["problems"][0]
        assert feed.closing_notes()[0] == "stream: 2 rows could not be used, and were skipped"
    (tmp_path / "out/skipped_rows.jsonl").unlink()
    (feed,) = feeds(tokenizer, 1, 8, ranks=Ranks(part=1, num_parts=2), output_dir="out")
    for step in range(40):
        feed.take(step)
    assert not (tmp_path / "out/skipped_rows.jsonl").exists()  # another process of the same rank lists it
    (feed,) = feeds(tokenizer, 1, 8, on_bad_row="error", output_dir="out")
    with pytest.raises(
        UserError, match=r"part-0.jsonl:301: no 'completion'(.|\n)*leave them out with --on_bad_row skip"
    ):
        for step in range(80):
            feed.take(step)


def test_a_stream_of_other_rows_of_the_same_size_is_another_stream(tmp_path, tokenizer):
    make_files(tmp_path, 3)
    before = open_all(tokenizer, **flags()).fingerprint
    file = tmp_path / "part-1.jsonl"
    file.write_text(file.read_text().replace("row 70 ", "row 79 "))
    assert open_all(tokenizer, **flags()).fingerprint != before
