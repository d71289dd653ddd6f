"""Streams: the same samples in the same steps on every topology, and after every stop."""

import json

import numpy as np
import pytest
from data_helpers import open_all, preference_pairs, recipe, write

from kit.data.feed.ranks import Ranks
from kit.errors import UserError

BATCH = 8


pytestmark = pytest.mark.usefixtures("own_folder")


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


def feeds(tokenizer, world, size, state=None, **changes):
    settings = flags(per_device_train_batch_size=size, **changes)
    opened = open_all(tokenizer, **settings)
    return [
        opened.open_feed(recipe(**settings), Ranks(rank, world), 0, state or {}, settings.get("output_dir"))
        for rank in range(world)
    ]


def origins(ranks, steps):
    """Of each step, the samples of all ranks."""
    return [sorted(origin for feed in ranks for origin in feed.take(step).origins) for step in steps]


def state_of(ranks):
    """The sum over ranks, as ``reduce`` would make it."""
    return {"cursors": sum(np.array(feed.state()["cursors"]) for feed in ranks).tolist()}


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("num_files", [1, 8])
def test_every_topology_reads_the_same_steps(packing, num_files, tmp_path, tokenizer):
    make_files(tmp_path, num_files)
    runs = [origins(feeds(tokenizer, *shape, packing=packing), range(50)) for shape in [(1, 8), (2, 4), (8, 1)]]
    assert runs[0] == runs[1] == runs[2]
    assert all(len(set(step)) >= BATCH for step in runs[0][:5])


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("stop", [1, 23])
def test_a_stream_goes_on_where_it_stopped_on_any_topology(packing, stop, tmp_path, tokenizer):
    make_files(tmp_path, 3)
    whole = origins(feeds(tokenizer, 2, 4, packing=packing), range(50))
    before = feeds(tokenizer, 2, 4, packing=packing)
    assert origins(before, range(stop)) == whole[:stop]
    state = json.loads(json.dumps(state_of(before)))
    for shape in [(2, 4), (4, 2), (1, 8)]:
        assert origins(feeds(tokenizer, *shape, state, packing=packing), range(stop, 50)) == whole[stop:]


def test_an_epoch_has_every_row_once_and_another_order(tmp_path, tokenizer):
    make_files(tmp_path, 4, rows_each=40)
    steps = origins(feeds(tokenizer, 1, 8), range(40))
    seen = [origin for step in steps for origin in step]
    assert sorted(seen[:160]) == sorted(f"part-{f}.jsonl:{i + 1}" for f in range(4) for i in range(40))
    assert sorted(seen[160:]) == sorted(seen[:160]) and seen[160:] != seen[:160]


def sequences_of(ranks, steps):
    """Of each step the targets of each sequence of all ranks, in no order."""
    taken = []
    for step in steps:
        batches = [batch for feed in ranks for batch in feed.take(step).micro_batches]
        taken.append(
            sorted(
                (batch.targets[batch.sequence_ids == k].tolist(), k % 2)
                for batch in batches
                for k in range(len(batch.labels))
            )
        )
    return taken


PAIRS = {"objective": "dpo", "method": "lora"}  # its reference is the model without its adapter


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_of_pairs_has_the_samples_of_the_cache_on_every_topology(packing, tmp_path, tokenizer):
    rows = preference_pairs(40)
    for f in range(2):
        write(tmp_path / f"part-{f}.jsonl", *rows[f::2])
    train = open_all(tokenizer, dataset="part-*.jsonl", **PAIRS, max_length=128).train
    cached = sorted(
        (ids[np.flatnonzero(weights)].tolist(), k)
        for i in range(40)
        for k, (ids, weights) in enumerate(train.sequences(i))
    )
    runs = [sequences_of(feeds(tokenizer, *shape, **PAIRS, packing=packing), range(5)) for shape in ((1, 8), (2, 4))]
    assert runs[0] == runs[1]
    if not packing:  # an epoch is five steps
        assert sorted(each for step in runs[0] for each in step) == cached
    assert all(each in cached for step in runs[0] for each in step)


@pytest.mark.slow
def test_data_sets_are_mixed_by_weight(tmp_path, tokenizer):
    make_files(tmp_path, 2)
    mix = "[{path: part-0.jsonl, weight: 3}, {path: part-1.jsonl, weight: 1}]"
    runs = [origins(feeds(tokenizer, *shape, dataset=mix), range(100)) for shape in [(1, 8), (4, 2)]]
    assert runs[0] == runs[1]
    share = np.mean([origin.startswith("part-0") for step in runs[0] for origin in step])
    assert 0.7 < share < 0.8


def numbers(feed, step):
    """The number of each sample that a rank has in a step, which seeds its noise, by its tokens."""
    found = {}
    for micro_batch in feed.take(step).micro_batches:
        ids = micro_batch.input_ids.flatten()
        found |= {number: tuple(ids[start : start + size].tolist()) for start, size, number in micro_batch.segments}
    return found


@pytest.mark.parametrize("packing", [False, True])
def test_a_sample_of_a_mixture_has_one_number_on_every_topology(packing, tmp_path, tokenizer):
    make_files(tmp_path, 2, rows_each=40)
    mix = "[{path: part-0.jsonl, weight: 3}, {path: part-1.jsonl, weight: 1}]"
    runs = []
    for world, size in [(1, 8), (1, 2), (4, 1)]:
        ranks = feeds(tokenizer, world, size, dataset=mix, packing=packing)
        runs.append([[numbers(feed, step) for feed in ranks] for step in range(4)])
    merged = [[{number: ids for rank in step for number, ids in rank.items()} for step in run] for run in runs]
    assert merged[0] == merged[1] == merged[2]
    # No two samples of a step have the same number.
    assert all(len(each) == sum(map(len, step)) >= BATCH for each, step in zip(merged[2], runs[2], strict=True))


def test_a_stream_shorter_than_a_batch_still_feeds_every_lane(tmp_path, tokenizer):
    make_files(tmp_path, 1, rows_each=3)
    (feed,) = feeds(tokenizer, 1, 8)
    assert [len(feed.take(step).origins) for step in range(5)] == [8] * 5


@pytest.mark.slow
def test_every_row_comes_as_often_however_unequal_the_files(tmp_path, tokenizer):
    write(tmp_path / "part-0.jsonl", *[{"prompt": f"few {i} ", "completion": "a"} for i in range(5)])
    write(tmp_path / "part-1.jsonl", *[{"prompt": f"many {i} ", "completion": "a"} for i in range(155)])
    runs = [origins(feeds(tokenizer, *shape), range(40)) for shape in [(1, 8), (4, 2)]]
    assert runs[0] == runs[1]
    seen = [origin for step in runs[0] for origin in step]
    assert {seen.count(origin) for origin in set(seen)} == {2} and len(set(seen)) == 160


def test_a_state_that_does_not_belong_to_the_stream_is_refused(tmp_path, tokenizer):
    make_files(tmp_path, 1)
    for cursors in ([1], [[["x"]]], [[[-1, 0, 0]] * 8]):
        with pytest.raises(UserError, match="the checkpoint does not match this stream"):
            feeds(tokenizer, 1, 8, {"cursors": cursors})


def bad_later(folder, num_bad=1):
    """A bad row beyond the first block, which is checked before the run."""
    make_files(folder, 1, 4000)
    with (folder / "part-0.jsonl").open("a") as file:
        file.write('{"prompt": "a"}\n' * num_bad)


def run_through(feed, steps=510):
    for step in range(steps):
        feed.take(step)
    return feed


@pytest.mark.slow
def test_a_later_bad_row_is_skipped_and_listed_once_or_ends_the_run(tmp_path, tokenizer):
    bad_later(tmp_path)
    (tmp_path / "out").mkdir()
    for on_bad_row in (None, "skip"):
        (feed,) = feeds(tokenizer, 1, 8, max_steps=1200, on_bad_row=on_bad_row, output_dir="out")
        run_through(feed, 1100)  # two epochs
        (line,) = (tmp_path / "out/skipped_rows.jsonl").read_text().splitlines()
        row = json.loads(line)
        assert row["row"] == "part-0.jsonl:4001" and "no 'completion'" in row["problems"][0]
        assert feed.closing_notes()[0] == "stream: 2 rows could not be used, and were skipped"
    (feed,) = feeds(tokenizer, 1, 8, max_steps=1200, on_bad_row="error", output_dir="out")
    with pytest.raises(
        UserError, match=r"part-0.jsonl:4001: no 'completion'(.|\n)*same command with --on_bad_row skip"
    ):
        run_through(feed)


def test_pieces_of_files_tell_copies_of_the_same_size_apart(tmp_path, tokenizer):
    make_files(tmp_path, 3)

    def contents():
        return open_all(tokenizer, **flags()).contents(), open_all(tokenizer, **flags()).fingerprint

    before = contents()
    file = tmp_path / "part-1.jsonl"
    file.write_text(file.read_text().replace("row 70 ", "row 79 "))
    after = contents()
    assert before[0] != after[0] and before[0].keys() == {"dataset"}
    assert before[1] == after[1]  # a run that began before goes on
