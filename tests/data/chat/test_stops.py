"""The tokens that may end an answer."""

import pytest
from data_helpers import byte_level_tokenizer

from kit.data.chat.stops import Stops


@pytest.fixture(scope="module")
def stops():
    tokenizer = byte_level_tokenizer(["<|im_end|>", "<|user|>"])
    tokenizer.add_tokens(["</call>"])
    return Stops(tokenizer)


def test_a_stop_is_an_added_token_at_the_end(stops):
    assert (stops.eos, stops.longest) == ("<|endoftext|>", len("<|endoftext|>"))
    assert stops.before("Hi<|im_end|>", 12) == "<|im_end|>" and stops.before("Hi</call>", 9) == "</call>"
    assert stops.before("Hi<|im_end|>", 11) == "" and stops.before("<|im_end|>", 10, start=1) == ""
    assert stops.within("Hi</call><|im_end|>\n<|im_end|>") == 3


@pytest.mark.parametrize(
    ("text", "end", "taken"),
    [
        ("Hi\n <|user|>Bye", 2, "\n <|user|>"),
        ("Hi</call><|user|>", 9, "<|user|>"),  # which parts the text, but ends no turn
        ("Hi<|im_end|><|user|>", 12, ""),
        ("Hi</call>", 2, ""),
        ("Hi there", 2, ""),
    ],
)
def test_the_token_of_the_next_turn_ends_an_answer_that_has_none(text, end, taken, stops):
    assert text[end : stops.with_next(text, end)] == taken


def test_a_token_that_closes_a_part_of_the_answer_ends_no_turn(stops):
    assert stops.ends_turn("Hi<|im_end|>", 0, 12) and not stops.ends_turn("Hi", 0, 2)
    assert not stops.ends_turn("Hi<call>x</call>", 2, 16)
    assert stops.ends_turn("<call>x</call>", 6, 14)  # what was opened before the answer
