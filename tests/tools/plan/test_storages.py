"""Bytes are counted once for each storage, from when it is shown until it is freed."""

import torch

from kit.tools.plan.storages import Storages


def test_views_share_their_storage_and_a_freed_one_counts_no_more():
    storages = Storages()
    first, second = torch.ones(8), torch.ones(4)
    storages.hold([first, first[2:], first.view(2, 4), second])
    del first
    storages.hold([torch.ones(2)])  # freed at once
    assert storages.peaks() == {"cpu": 48} and storages.at_peaks()["cpu"] == {"activations": 48}
    storages.begin()
    assert storages.peaks() == {"cpu": 16}


def test_a_component_may_be_known_only_after_the_peak():
    storages = Storages(vocab_size=7)
    weight, logits, other = torch.ones(4), torch.ones(2, 7), torch.ones(3)
    storages.hold([weight, logits, other])
    storages.hold([weight], "trainable weights")
    assert storages.at_peaks()["cpu"] == {"logits": 56, "trainable weights": 16, "activations": 12}


def test_a_mark_remembers_what_was_held_then():
    storages = Storages()
    kept = torch.ones(4)
    storages.hold([kept])
    storages.mark("before")
    storages.hold([more := torch.ones(100)])
    del more
    assert storages.at_marks()["cpu"]["before"] == {"activations": 16}
    assert storages.peaks() == {"cpu": 416}


def test_a_resized_storage_counts_at_its_new_size(monkeypatch):
    monkeypatch.setattr(torch.UntypedStorage, "resize_", torch.UntypedStorage.resize_)  # so that it is put back
    storages = Storages()
    storages.watch_resizes()
    gathered = torch.ones(10)
    storages.hold([gathered])
    gathered.untyped_storage().resize_(0)
    storages.begin()
    assert storages.peaks() == {"cpu": 0}
    gathered.untyped_storage().resize_(80)
    assert storages.peaks() == {"cpu": 80}


def test_tensors_without_memory_do_not_count():
    storages = Storages()
    storages.hold([torch.ones(9, device="meta"), None, 3])
    assert storages.peaks() == {}
