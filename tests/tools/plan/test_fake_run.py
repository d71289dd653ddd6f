"""What stands in for data and threads in a simulated run. tests/tools/plan/test_simulate.py runs it."""

import pytest

from kit.data.feed.mismatched import Mismatched
from kit.tools.plan.fake_run import AtOnce, RandomSamples


def test_samples_have_the_lengths_that_were_asked_for_and_the_same_ids_each_time():
    samples = RandomSamples([[5], [3]], vocab_size=7)
    assert [len(samples[i][0]) for i in range(len(samples))] == [5, 3]
    assert (samples[0][0] == samples[0][0]).all() and samples[0][0].max() < 7
    assert samples.num_targets.tolist() == [4, 2]  # no token before the first predicts it


def test_pairs_are_two_sequences_and_what_is_rated_has_a_label():
    pairs = RandomSamples([[5, 3], [2, 4]], vocab_size=7, rows="pairs")
    assert pairs.lengths.tolist() == [8, 6] and pairs.row_lengths.tolist() == [5, 4]
    assert pairs.num_targets.tolist() == [6, 4]  # of each half the first token is none
    assert [len(ids) for ids, _ in pairs.sequences(1)] == [2, 4] and pairs.labels.all() and not pairs.are_rated
    rated = RandomSamples([[5], [3]], vocab_size=7, rows="rated")
    assert rated.are_rated and rated.labels.tolist() == [True, False]
    mismatched = Mismatched(rated, seed=0, max_length=5)
    assert mismatched.lengths.tolist() == [3, 5]  # the first token, and the rest of the other one


def test_work_is_done_in_the_calling_thread_and_its_error_kept():
    executor = AtOnce(1)
    assert executor.submit(pow, 2, 3).result() == 8
    failed = executor.submit(int, "no")
    with pytest.raises(ValueError):
        failed.result()
