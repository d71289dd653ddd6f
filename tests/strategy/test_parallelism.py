"""Groups of processes are taken as Accelerate's keys say, or refused with what to write instead."""

import pytest

from kit.errors import Problem
from kit.strategy.parallelism import PREFIX, GroupSizes, group_sizes


def asked(strategy="fsdp2", **sizes):
    """The sizes that a config asks for, and what is refused of it."""
    refused = []
    config = {PREFIX + key: value for key, value in sizes.items()}
    found = group_sizes(
        config, strategy, lambda *words: refused.append(str(Problem(words[0], str(words[1]), *words[2:])))
    )
    return found, "\n".join(refused)


def test_the_sizes_are_those_of_the_config():
    cases = [
        ({}, GroupSizes()),
        ({"dp_replicate_size": 2}, GroupSizes(replicas=2)),
        ({"dp_shard_size": "8"}, GroupSizes(shards=8)),  # of a launcher's environment
        ({"dp_replicate_size": 2, "dp_shard_size": 8}, GroupSizes(replicas=2, shards=8)),
        ({"dp_replicate_size": 1, "dp_shard_size": 8}, GroupSizes(replicas=1, shards=8)),
        ({"dp_replicate_size": 1}, GroupSizes()),
        # What `accelerate config` and its launcher write beside.
        ({"dp_replicate_size": 1, "dp_shard_size": 1, "tp_size": 1, "cp_size": 1, "sp_size": 1}, GroupSizes()),
        ({"cp_backend": "torch", "cp_comm_strategy": "allgather", "sp_backend": "deepspeed"}, GroupSizes()),
    ]
    for sizes, groups in cases:
        assert asked(**sizes) == (groups, ""), (sizes, groups)


def test_what_is_not_offered_is_refused_with_the_reason():
    cases = [
        ("fsdp2", {"tp_size": 2}, ["tp_size: 2; expected 1", "neither with adapters", "docs/parallelism.md"]),
        ("single", {"tp_size": "2"}, ["tp_size: 2; expected 1"]),
        ("fsdp2", {"cp_size": 2}, ["cp_size: 2; expected 1", "docs/parallelism.md"]),
        ("fsdp2", {"sp_size": 4}, ["sp_size: 4; expected 1", "DeepSpeed"]),
        ("fsdp2", {"dp_replicate": 2}, ["a key of Accelerate", "did you mean 'parallelism_config_dp_replicate_size'?"]),
        ("fsdp2", {"ep_size": 2}, ["a key of Accelerate"]),
        ("fsdp2", {"dp_replicate_size": 0}, ["a whole number from 1"]),
        ("fsdp2", {"dp_shard_size": "two"}, ["a whole number from 1"]),
        (
            "fsdp2",
            {"dp_replicate_size": 2, "dp_shard_size": 1},
            ["dp_shard_size: 1; expected 2 or more", "--config ddp"],
        ),
        ("fsdp1", {"dp_replicate_size": 2}, ["1 without FSDP2", "fsdp_version: 2"]),
        ("ddp", {"dp_shard_size": 2}, ["1 without FSDP2", "distributed_type: FSDP"]),
    ]
    for case in cases:
        strategy, sizes, words = case
        text = asked(strategy, **sizes)[1]
        assert len(text.splitlines()) in (1, 2), case
        assert all(word in text for word in words), text


def test_processes_that_make_no_such_groups_are_refused():
    cases = [
        (GroupSizes(), 3, ""),
        (GroupSizes(replicas=2), 4, ""),
        (GroupSizes(replicas=2), 16, ""),
        (GroupSizes(replicas=2), 2, "dp_replicate_size 2 on 2 processes; expected a multiple of 2, from 4 on"),
        (GroupSizes(replicas=2), 5, "dp_replicate_size 2 on 5 processes"),
        (GroupSizes(shards=8), 32, ""),
        (GroupSizes(shards=8), 8, ""),  # one copy: plain FSDP2
        (GroupSizes(shards=8), 4, "dp_shard_size 8 on 4 processes; expected a multiple of 8, from 8 on"),
        (GroupSizes(replicas=2, shards=8), 16, ""),
        (GroupSizes(replicas=2, shards=8), 8, "2 x 8 = 16 (dp_replicate_size x dp_shard_size); expected 8"),
        (GroupSizes(replicas=1, shards=4), 8, "1 x 4 = 4"),
    ]
    for groups, num_processes, found in cases:
        text = "".join(map(str, groups.problems(num_processes)))
        assert text.startswith(f"parallelism_config: {found}") if found else not text, (groups, num_processes, found)


def test_the_size_that_is_left_out_follows_from_the_number_of_processes():
    assert [GroupSizes(replicas=2).num_replicas(n) for n in (4, 16)] == [2, 2]
    assert [GroupSizes(shards=8).num_replicas(n) for n in (8, 32)] == [1, 4]
    assert GroupSizes().num_replicas(6) == 1
    assert (
        GroupSizes(replicas=8).num_replicas(4) == GroupSizes(shards=8).num_replicas(4) == 1
    )  # a fault, reported elsewhere


@pytest.mark.parametrize("groups", [GroupSizes(replicas=3), GroupSizes(shards=4), GroupSizes(replicas=2, shards=3)])
def test_a_rehearsal_has_as_many_processes_as_the_groups_need(groups):
    assert groups.problems(groups.fewest) == []
    assert GroupSizes().fewest == 2
