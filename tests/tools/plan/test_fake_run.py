"""What stands in for data and threads in a simulated run. tests/tools/plan/test_simulate.py runs it."""

import pytest

from kit.tools.plan.fake_run import AtOnce, RandomSamples


def test_samples_have_the_lengths_that_were_asked_for_and_the_same_ids_each_time():
    samples = RandomSamples([5, 3], vocab_size=7)
    assert [len(samples[i][0]) for i in range(len(samples))] == [5, 3]
    assert (samples[0][0] == samples[0][0]).all() and samples[0][0].max() < 7
    assert samples.num_targets.tolist() == [4, 2]  # no token before the first predicts it


def test_work_is_done_in_the_calling_thread_and_its_error_kept():
    executor = AtOnce(1)
    assert executor.submit(pow, 2, 3).result() == 8
    failed = executor.submit(int, "no")
    with pytest.raises(ValueError):
        failed.result()
