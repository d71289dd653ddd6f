"""Streams: the same samples in the same steps on every topology, and after every stop."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from data_helpers import open_all, preference_pairs, recipe, write

from kit.data.feed.lanes import COUNTS
from kit.data.feed.ranks import Ranks
from kit.data.read import sources
from kit.errors import TrainingError, UserError

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
    return {key: sum(np.array(feed.state()[key]) for feed in ranks).tolist() for key in ("cursors", "counts")}


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("num_files", [1, 3, 8])
def test_every_topology_reads_the_same_steps(packing, num_files, tmp_path, tokenizer):
    make_files(tmp_path, num_files)
    runs = [origins(feeds(tokenizer, *shape, packing=packing), range(50)) for shape in [(1, 8), (2, 4), (8, 1)]]
    assert runs[0] == runs[1] == runs[2]
    assert all(len(set(step)) >= BATCH for step in runs[0][:5])


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("stop", [1, 7, 23])
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


def test_files_are_read_by_one_rank_only_where_there_are_enough(tmp_path, tokenizer, monkeypatch):
    make_files(tmp_path, 8)
    files = []
    for feed in feeds(tokenizer, 2, 4):
        files.append({origin.split(":")[0] for step in range(8) for origin in feed.take(step).origins})
    assert len(files[0]) == len(files[1]) == 4 and not files[0] & files[1]


def test_the_counts_are_those_of_the_samples(tmp_path, tokenizer):
    make_files(tmp_path, 2)
    opened = open_all(tokenizer, **flags())
    (feed,) = feeds(tokenizer, 1, 8)
    batch = feed.take(0)
    assert batch.num_targets.sum() == sum(len(b.targets) for b in batch.micro_batches) == batch.target_weights.sum()
    assert batch.num_tokens.sum() == sum(int(b.attention_mask.sum()) for b in batch.micro_batches)
    assert opened.dataset_names == ["part"] and len(opened.fingerprint) == 32


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


def test_the_counts_of_a_stream_of_pairs_are_those_of_its_samples(tmp_path, tokenizer):
    write(tmp_path / "part-0.jsonl", *preference_pairs(40), {"prompt": "a " * 200, "chosen": "b", "rejected": "c"})
    settings = {**PAIRS, "max_length": 64, "shuffle_buffer_size": 41}
    for shape in ((1, 8), (2, 4)):
        ranks = feeds(tokenizer, *shape, **settings)
        for step in range(6):
            shares = [feed.take(step) for feed in ranks]
            batches = [batch for share in shares for batch in share.micro_batches]
            chosen = sum(float(batch.weights[batch.sequence_ids % 2 == 0].sum()) for batch in batches)
            for share in shares:  # a strategy makes the sums over ranks: here each has its own counts
                own = share.micro_batches
                assert share.num_samples == sum(len(batch.labels) for batch in own) // 2
                assert share.num_targets.sum() == sum(len(batch.targets) for batch in own)
                assert share.num_tokens.sum() == sum(batch.num_tokens for batch in own)
            assert sum(share.chosen_weight for share in shares) == chosen
        assert sum(feed.take(6).counts["num_truncated"] for feed in ranks) >= 1


def test_rows_of_a_stream_of_pairs_that_cannot_be_compared_are_skipped_and_listed(tmp_path, tokenizer):
    same = {"prompt": "Hi ", "chosen": "a", "rejected": "a"}
    write(tmp_path / "part-0.jsonl", *preference_pairs(20), same, *preference_pairs(40)[20:])
    changes = {**PAIRS, "shuffle_buffer_size": 48, "output_dir": str(tmp_path)}
    with pytest.raises(UserError, match=r"part-0.jsonl:21 rejected: the same tokens as chosen"):
        feeds(tokenizer, 1, 8, **changes, on_bad_row="error")
    (feed,) = feeds(tokenizer, 1, 8, **changes, on_bad_row="skip")
    for step in range(6):
        feed.take(step)
    (line,) = (tmp_path / "skipped_rows.jsonl").read_text().splitlines()
    assert json.loads(line)["row"] == "part-0.jsonl:21"


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


@pytest.mark.slow
def test_bad_rows_at_the_beginning_stop_the_run_and_later_ones_are_skipped(tmp_path, tokenizer):
    make_files(tmp_path, 1, rows_each=6000)
    lines = (tmp_path / "part-0.jsonl").read_text().splitlines()
    (tmp_path / "part-0.jsonl").write_text("\n".join([*lines, "{"]))
    (feed,) = feeds(tokenizer, 1, 8, shuffle_buffer_size=10_000)
    assert feed.take(0).counts["skipped_rows"] == 1
    assert "part-0.jsonl:6001: not JSON" in feed.closing_notes()[-1]
    (tmp_path / "part-0.jsonl").write_text("\n".join([lines[0], "{", *lines]))
    with pytest.raises(UserError, match=r"part-0.jsonl:2: not JSON"):
        feeds(tokenizer, 1, 8)


def test_rows_on_the_same_line_are_different_rows(tmp_path, tokenizer):
    rows = [{"prompt": f"row {i} ", "completion": "a"} for i in range(32)]
    (tmp_path / "part-0.json").write_text(json.dumps(rows))
    ranks = feeds(tokenizer, 2, 4, dataset="part-0.json")
    prompts = [ids.tolist() for feed in ranks for step in range(4) for ids in first_rows(feed.take(step))]
    assert len({tuple(ids) for ids in prompts}) == 32


def first_rows(batch):
    return [
        row[: int(mask.sum())]
        for b in batch.micro_batches
        for row, mask in zip(b.input_ids, b.attention_mask, strict=True)
    ]


def test_a_stream_shorter_than_a_batch_still_feeds_every_lane(tmp_path, tokenizer):
    make_files(tmp_path, 1, rows_each=3)
    (feed,) = feeds(tokenizer, 1, 8)
    assert [len(feed.take(step).origins) for step in range(5)] == [8] * 5


def test_a_stream_without_any_usable_row_ends_the_run_with_a_message(tmp_path, tokenizer):
    make_files(tmp_path, 1, rows_each=20)
    opened = open_all(tokenizer, **flags())
    (tmp_path / "part-0.jsonl").write_text('{"prompt": 1}\n' * 20)
    feed = opened.open_feed(recipe(**flags()), Ranks(), 0, {})
    with pytest.raises(TrainingError, match="8 epochs without a sample that could be used"):
        feed.take(0)


@pytest.mark.slow
def test_lanes_stay_together_and_little_waits(tmp_path, tokenizer):
    make_files(tmp_path, 1, rows_each=3000)
    (feed,) = feeds(tokenizer, 1, 8, shuffle_buffer_size=35)  # no multiple of the lanes
    for step in range(200):
        feed.take(step)
    cursors = np.array(feed.state()["cursors"])[0, :, 1]
    assert cursors.max() - cursors.min() <= 1
    assert sum(len(queue) for queue in feed._all_sub_streams[0]._queues.values()) <= 2 * 40


@pytest.mark.slow
def test_every_row_comes_as_often_however_unequal_the_files(tmp_path, tokenizer):
    write(tmp_path / "part-0.jsonl", *[{"prompt": f"few {i} ", "completion": "a"} for i in range(5)])
    write(tmp_path / "part-1.jsonl", *[{"prompt": f"many {i} ", "completion": "a"} for i in range(155)])
    runs = [origins(feeds(tokenizer, *shape), range(40)) for shape in [(1, 8), (4, 2)]]
    assert runs[0] == runs[1]
    seen = [origin for step in runs[0] for origin in step]
    assert {seen.count(origin) for origin in set(seen)} == {2} and len(set(seen)) == 160


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4, 8])
def test_a_stream_of_two_rows_trains_on_any_topology(world, tmp_path, tokenizer):
    make_files(tmp_path, 1, rows_each=2)
    assert [len(step) for step in origins(feeds(tokenizer, world, 1), range(9))] == [8] * 9


@pytest.mark.slow
def test_ids_beyond_the_model_are_skipped_wherever_they_come(tmp_path, tokenizer):
    rows = [{"input_ids": [5, 6, 7 + i % 3]} for i in range(60_000)]
    rows[-1] = {"input_ids": [5, 6, 99_999]}
    write(tmp_path / "part-0.jsonl", *rows)
    (feed,) = feeds(tokenizer, 1, 8, shuffle_buffer_size=60_000)
    assert feed.take(0).counts["skipped_rows"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stop", [1, 4, 11, 47])
def test_counts_after_a_stop_are_those_of_a_run_without_one(stop, world, packing, tmp_path, tokenizer):
    make_files(tmp_path, 3)
    lines = (tmp_path / "part-2.jsonl").read_text().splitlines()
    (tmp_path / "part-2.jsonl").write_text("\n".join([*lines[:50], "{", *lines[50:], "["]))
    mix = "[{path: part-0.jsonl}, {path: 'part-[12].jsonl'}]"
    changes = {"max_length": 24, "packing": packing, "dataset": mix}

    def reported(ranks, steps, earlier):
        """The sums over ranks; each rank here adds only its own to those of earlier starts."""
        return [
            earlier + sum(np.array([*feed.take(step).counts.values()]) - earlier for feed in ranks) for step in steps
        ]

    nothing = np.zeros(len(COUNTS), int)
    whole = reported(feeds(tokenizer, world, 2, **changes), range(60), nothing)
    before = feeds(tokenizer, world, 2, **changes)
    earlier = reported(before, range(stop), nothing)[-1]
    again = reported(feeds(tokenizer, world, 2, state_of(before), **changes), range(stop, 60), earlier)
    assert np.array_equal(again, whole[stop:])
    first, last = (dict(zip(COUNTS, counts, strict=True)) for counts in (earlier, whole[-1]))
    assert last["num_truncated"] > first["num_truncated"] > 0 and last["skipped_rows"]


@pytest.mark.parametrize(
    "change",
    [{"cursors": [1]}, {"cursors": [[["x"]]]}, {"cursors": [[[-1, 0, 0]] * 8]}, {"counts": [1]}, {"counts": {}}],
)
def test_a_state_that_does_not_belong_to_the_stream_is_refused(change, tmp_path, tokenizer):
    make_files(tmp_path, 1)
    state = state_of(feeds(tokenizer, 1, 8)) | change
    with pytest.raises(UserError, match="no place in this stream"):
        feeds(tokenizer, 1, 8, state)
    with pytest.raises(UserError, match="no place in this stream"):
        feeds(tokenizer, 1, 8, {"cursors": state["cursors"]})


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


def test_each_of_many_weights_is_that_of_its_row(tmp_path, tokenizer):
    weights = [0.25 + i / 1024 for i in range(400)]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write(tmp_path / "part-0.jsonl", *({"messages": [turns[0], {**turns[1], "weight": weight}]} for weight in weights))
    (feed,) = feeds(tokenizer, 1, 8, shuffle_buffer_size=400, chat_template="chatml")
    seen = {
        weight for step in range(50) for batch in feed.take(step).micro_batches for weight in batch.weights.tolist()
    }
    assert seen == set(weights)
    with pytest.raises(UserError, match="weight: more than 256 different weights"):
        open_all(tokenizer, dataset="part-0.jsonl", chat_template="chatml")


@pytest.mark.slow
def test_too_many_bad_rows_end_a_stream(tmp_path, tokenizer):
    bad_later(tmp_path, 800)
    (feed,) = feeds(tokenizer, 1, 8, max_steps=1200, on_bad_row="skip", output_dir="nowhere")
    with pytest.raises(UserError, match=r"rows \(1\d.\d%\) cannot be used; expected at most 10% to skip"):
        run_through(feed, 610)


def test_bad_rows_at_the_beginning_are_skipped_where_that_is_asked_for(tmp_path, tokenizer):
    make_files(tmp_path, 1)
    with (tmp_path / "part-0.jsonl").open("a") as file:
        file.write('{"prompt": "a"}\n')
    with pytest.raises(UserError, match=r"part-0.jsonl:101: no 'completion'"):
        feeds(tokenizer, 1, 8)
    (feed,) = feeds(tokenizer, 1, 8, on_bad_row="skip", output_dir="nowhere")
    feed.take(0)


def test_a_stream_reports_columns_of_its_first_rows_that_are_not_used(tmp_path, tokenizer):
    write(tmp_path / "part-0.jsonl", *({"text": f"row {i}", "url": "x"} for i in range(20)))
    opened = open_all(tokenizer, **flags())
    assert "part-*.jsonl: not used in its first rows: url (100.0%)" in opened.notes


def test_a_stream_warns_of_a_text_to_replace_that_its_first_rows_lack(tmp_path, tokenizer):
    write(tmp_path / "part-0.jsonl", *({"text": f"row {i}"} for i in range(20)))
    entry = {"path": "part-*.jsonl", "replace": {"row": "line", "{{NAM}}": "Rob"}}
    opened = open_all(tokenizer, **flags(dataset=[entry]))
    assert "warning: part-*.jsonl: replace: its first rows have no '{{NAM}}'" in opened.notes


@pytest.mark.slow
def test_a_run_that_a_bad_row_ended_goes_on_as_one_that_skipped_it_from_the_start(tmp_path, tokenizer):
    bad_later(tmp_path)
    changes = {"max_steps": 600, "output_dir": "nowhere", "shuffle_buffer_size": 8}
    whole = feeds(tokenizer, 2, 4, on_bad_row="skip", **changes)
    wanted = origins(whole, range(520))
    ended = feeds(tokenizer, 2, 4, on_bad_row="error", **changes)
    assert origins(ended, range(400)) == wanted[:400]
    state = state_of(ended)
    with pytest.raises(UserError, match="--on_bad_row skip"):
        origins(ended, range(400, 520))
    again = feeds(tokenizer, 2, 4, state, on_bad_row="skip", **changes)
    assert origins(again, range(400, 520)) == wanted[400:]
    assert state_of(again)["cursors"] == state_of(whole)["cursors"]
    assert [feed.state()["counts"][0] for feed in again] == [feed.state()["counts"][0] for feed in whole]


class Machines:
    """Two ranks on two machines, each in a thread, with the sums and the comparisons that the strategy gives them."""

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=60)
        self.parts, self.first = {}, {}

    def ranks(self, rank):
        def total(tensor):
            self.parts[rank] = tensor
            self.barrier.wait()
            result = self.parts[0] + self.parts[1]
            self.barrier.wait()
            return result

        return Ranks(rank, 2, total, lambda name, value: self.first.setdefault(name, value) == value)

    def run(self, tokenizer, folder, rank, num_steps):
        """The number of steps taken, and the error."""
        settings = flags(per_device_train_batch_size=4, dataset=str(folder / "part-*.jsonl"))
        opened = open_all(tokenizer, **settings)
        feed = opened.open_feed(recipe(**settings), self.ranks(rank), 0, {}, str(folder))
        for step in range(num_steps):
            try:
                feed.take(step)
            except UserError as error:
                return step, str(error)
        return num_steps, ""


@pytest.mark.slow
@pytest.mark.parametrize("differ", [False, True])
def test_other_rows_on_another_machine_end_all_ranks_before_a_step_uses_them(differ, tmp_path, tokenizer):
    folders = [tmp_path / name for name in ("alpha", "beta")]
    for folder in folders:
        folder.mkdir()
        make_files(folder, 1, rows_each=200)
    file = folders[1] / "part-0.jsonl"
    if differ:
        file.write_text(file.read_text().replace("row 130 ", "row 139 "))
    machines = Machines()
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda rank: machines.run(tokenizer, folders[rank], rank, 30), (0, 1)))
    if not differ:
        assert ended == [(30, "")] * 2
        return
    # Windows have 40 rows, and a step takes 8: row 130 is in the window that the steps from the 16th on take. It is
    # read ahead, so the difference may be known a few steps earlier, but on both at the same one.
    steps = {num_steps for num_steps, _ in ended}
    assert len(steps) == 1 and max(steps) <= 15
    assert all("part-*.jsonl holds other rows on another machine" in text for _, text in ended)
    assert any("part-0.jsonl:121 to" in text and f"found before step {max(steps) + 1}" in text for _, text in ended)


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


def test_pieces_are_spread_over_all_files_and_few_bytes_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SAMPLED_BYTES", 100)
    for name in "abc":
        write(tmp_path / f"{name}.jsonl", *({"text": f"{i:06}"} for i in range(1000)))  # 18 bytes a line
    first = sources.open_source("*.jsonl", "train", "dataset", streaming=True)
    digest = first.sampled_digest(30)  # a piece every 1,800 bytes: lines 1 to 6, 101 to 106, ...

    def changed(name, line):
        file = tmp_path / f"{name}.jsonl"
        text = file.read_text()
        file.write_text(text.replace(f"{line:06}", "other!"))
        result = first.sampled_digest(30) != digest
        file.write_text(text)
        return result

    assert all(changed(name, line) for name in "abc" for line in (0, 100, 900))
    assert not any(changed(name, line) for name in "abc" for line in (50, 950))
