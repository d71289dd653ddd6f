"""Samples as a run sees them: a choice keeps origin and content, and what two sets share is counted."""

import tracemalloc

import numpy as np
import pytest
from data_helpers import chat, open_all, pairs, write

from kit.data.chat.tokens import UNROLLED
from kit.data.samples.rows import SAMPLE
from kit.data.samples.samples import Samples, Store, duplicates


def both(tokenizer, **changes):
    """The samples of two files as one, and of each alone."""
    return [open_all(tokenizer, dataset=name, **changes).train for name in ("a.jsonl,b.jsonl", "a.jsonl", "b.jsonl")]


def as_lists(samples):
    return [(samples.origin(i), ids.tolist(), weights.tolist()) for i, (ids, weights) in enumerate(samples)]


def test_samples_of_several_files_are_those_of_each_file_one_after_another(tmp_path, tokenizer):
    weighed = chat("Hi", "Hello")
    weighed["messages"][1]["weight"] = 0.25  # so that the two files number their weights differently
    write(tmp_path / "a.jsonl", *pairs(3))
    write(tmp_path / "b.jsonl", weighed, chat("Bye", "Bye now"))
    joint, first, second = both(tokenizer, chat_template="chatml")
    assert as_lists(joint) == as_lists(first) + as_lists(second)
    assert joint.dataset_ids.tolist() == [0, 0, 0, 1, 1]
    assert set(joint[3][1].tolist()) == {0, 0.25}
    assert max(store.max_id for store in joint.stores) == max(ids.max() for ids, _ in joint)
    assert len({joint.fingerprint, first.fingerprint, second.fingerprint}) == 3


def test_what_is_chosen_from_a_choice_keeps_its_content_and_counts(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", *pairs(6))
    write(tmp_path / "b.jsonl", *pairs(6, "b"))
    joint, _, _ = both(tokenizer)
    chosen = joint.select(np.array([9, 2, 7, 0]), "first").select(np.array([3, 0]), "second")
    assert as_lists(chosen) == [as_lists(joint)[0], as_lists(joint)[9]]
    assert chosen.dataset_ids.tolist() == [0, 1]
    assert chosen.lengths.tolist() == [len(ids) for ids, _ in chosen]
    assert chosen.target_weights.tolist() == [weights[1:].sum() for _, weights in chosen]
    assert chosen.report == {
        "num_samples": 2,
        "num_tokens": chosen.lengths.sum(),
        "num_supervised_tokens": sum((weights[1:] > 0).sum() for _, weights in chosen),
    }


def test_samples_that_one_row_became_have_its_number(tmp_path, tokenizer):
    long = {"text": "Hello there, how are you? " * 20}
    write(tmp_path / "a.jsonl", {"text": "Hi"}, long)
    write(tmp_path / "b.jsonl", {"text": "Hi"}, {"text": "Hi"})
    joint, _, _ = both(tokenizer, max_length=16, excess_length_strategy="split")
    num_pieces = len(joint) - 3
    assert num_pieces > 2
    assert joint.rows().tolist() == [0, *[1] * num_pieces, 2, 3]


def test_samples_are_the_same_as_others_token_for_token_or_in_their_letters_only(tmp_path, tokenizer):
    texts = ["Hello there, how are you?", "hello THERE how are you", "Hello where"]
    write(tmp_path / "a.jsonl", {"text": texts[0]}, {"text": "42"}, {"text": "Bye now"})
    write(tmp_path / "b.jsonl", *({"text": text} for text in texts))
    _, train, evaluation = both(tokenizer)
    assert duplicates(evaluation, train) == (1, 1)
    assert duplicates(train, train) == (3, 0)


def test_samples_without_letters_are_not_all_the_same(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", {"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]})
    write(tmp_path / "b.jsonl", {"input_ids": [5, 6, 7]}, {"input_ids": [7, 6, 5]})
    _, train, evaluation = both(tokenizer)
    assert duplicates(evaluation, train) == (1, 0)


def fake_samples(hashes, *starts):
    """Samples of stores that begin at ``starts``, with these hashes of their ids and texts."""
    stores = []
    for part in np.split(hashes, starts):
        rows = np.zeros(len(part), SAMPLE)
        rows["ids_hash"] = rows["text_hash"] = part
        stores.append(Store(None, "a", {"samples": rows}, {}, "a"))
    return Samples(stores)


@pytest.mark.parametrize("num_shared", [0, 1, 300])
@pytest.mark.parametrize("num_wanted", [1, 1000, 40_000])
def test_samples_that_are_shared_are_found_among_many_of_several_data_sets(num_wanted, num_shared):
    num_shared = min(num_shared, num_wanted)
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, 200_000, np.uint64, endpoint=False)
    train = fake_samples(hashes, 3, 150_000)
    wanted = np.concatenate([rng.integers(0, 2**64, num_wanted - num_shared, np.uint64), hashes[-num_shared or -1 :]])
    wanted = rng.permutation(wanted[: num_wanted or 1])
    assert np.array_equal(train.have("ids_hash", wanted), np.isin(wanted, hashes))
    evaluation = fake_samples(np.append(wanted, wanted[:1]))
    assert duplicates(evaluation, train) == (int(np.isin(np.append(wanted, wanted[:1]), hashes).sum()), 0)
    chosen = train.select(np.arange(0, 200_000, 3), "third")
    assert np.array_equal(chosen.have("ids_hash", wanted), np.isin(wanted, hashes[::3]))


def test_looking_for_few_samples_among_many_takes_the_memory_of_the_few():
    train = fake_samples(np.random.default_rng(0).integers(0, 2**64, 1_000_000, np.uint64))
    evaluation = fake_samples(train.hashes("ids_hash")[:1000])
    tracemalloc.start()
    duplicates(evaluation, train)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4e6  # the hashes of all are 8 MB


def test_of_a_conversation_that_became_several_samples_each_counts(tmp_path, tokenizer):
    last = "{{ '!' if loop.last and m.role == 'assistant' }}"  # which an earlier answer loses
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}" + last + "<|im_end|>{% endfor %}"
    (tmp_path / "own.jinja").write_text(template + "{{ 'assistant:' if add_generation_prompt }}")
    messages = chat("Hi", "Hello", "Bye", "Bye now", "Hi", "Hello " * 9)["messages"]
    write(tmp_path / "a.jsonl", {"messages": messages})
    store = open_all(tokenizer, dataset="a.jsonl", chat_template="own.jinja", max_length=24).train.stores[0]
    assert store.notes(24) == [
        "a.jsonl: 2 of 3 samples cut at 24 tokens",
        "a.jsonl: 1 of 3 samples dropped: nothing supervised left",
        f"a.jsonl: 1 of 1 conversations: {UNROLLED}",
    ]


@pytest.mark.parametrize("max_length", [16, 2048])
def test_what_became_of_the_rows_is_reported_with_counts(max_length, tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", {"text": "Hello there, how are you? " * 20}, "", {"text": "Hi"})
    store = open_all(tokenizer, dataset="a.jsonl", max_length=max_length).train.stores[0]
    cut = ["a.jsonl: 1 of 2 samples cut at 16 tokens"] if max_length == 16 else []
    assert store.notes(max_length) == [*cut, "a.jsonl: 1 blank lines skipped"]
    assert (store.report["num_samples"], store.report["num_truncated"]) == (2, len(cut))


def test_an_order_of_files_is_part_of_the_fingerprint(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", *pairs(3))
    write(tmp_path / "b.jsonl", *pairs(3, "b"))
    _, first, second = both(tokenizer)
    assert Samples([*first.stores, *second.stores]).fingerprint != Samples([*second.stores, *first.stores]).fingerprint
