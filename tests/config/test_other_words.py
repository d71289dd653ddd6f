"""Words without a counterpart here have one answer each, and none is a setting of this kit."""

from collections import Counter

from kit.config.other_kits import OTHER_KITS, other_kits_word
from kit.config.other_words import WORDS
from kit.config.validation import FLAGS


def test_each_word_stands_once_and_is_no_setting():
    words = Counter(word for text in WORDS.values() for word in text.split())
    assert [word for word, number in words.items() if number > 1 or word in FLAGS] == []


def test_each_word_has_the_answer_of_its_table():
    for answer, words in WORDS.items():
        for word in words.split():
            assert OTHER_KITS[word] == answer == other_kits_word(word, "something"), word
