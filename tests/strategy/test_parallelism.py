"""Process groups of HSDP follow Accelerate's keys, or are refused with a fix."""

from kit.strategy.parallelism import GroupSizes, group_sizes


def test_the_sizes_are_those_of_the_config():
    cases = {
        (None, None): GroupSizes(),
        (2, 8): GroupSizes(replicas=2, shards=8),
        (1, 1): GroupSizes(),  # what `accelerate config` writes where nothing was chosen
    }
    for sizes, groups in cases.items():
        assert group_sizes(*sizes, "fsdp2") == (groups, None), sizes
    assert "--config ddp" in group_sizes(2, 1, "fsdp2")[1][2]
    assert "1 without FSDP2" in group_sizes(2, None, "ddp")[1]


def test_processes_that_make_no_such_groups_are_refused():
    cases = [
        (GroupSizes(replicas=2), 16, ""),
        (GroupSizes(replicas=2), 2, "2 with dp_replicate_size 2; expected a multiple of 2, from 4 on"),
        (GroupSizes(shards=8), 8, ""),  # one copy: plain FSDP2
        (GroupSizes(replicas=8), 4, "4 with dp_replicate_size 8; expected a multiple of 8, from 16 on"),
        (GroupSizes(shards=8), 4, "4 with dp_shard_size 8"),
        (GroupSizes(replicas=2, shards=8), 16, ""),
        (GroupSizes(replicas=2, shards=8), 8, "8 with dp_replicate_size 2 and dp_shard_size 8; expected their product"),
    ]
    for groups, num_processes, found in cases:
        text = "".join(map(str, groups.problems(num_processes)))
        assert text.startswith(f"num_processes: {found}") if found else not text, (groups, num_processes, found)
