"""A prompt format puts the texts of a row between other words, and what cannot be one is refused with the reason."""

import pytest

from kit.config.prompt_format import checked_format, question, reads_input


def test_texts_stand_where_their_placeholders_do():
    cases = [
        ("{instruction}[\n{input}]", "A\nB", "A"),
        ("{instruction}", "A", "A"),
        ("Task[ and input]: {instruction}[ ({input})]\n", "Task and input: A (B)\n", "Task: A\n"),
        ("[[INST]] {instruction}[ [[{input}]]] [[/INST]]", "[INST] A [B] [/INST]", "[INST] A [/INST]"),
        ("{{{instruction}}}", "{A}", "{A}"),
        ("{instruction} {instruction}", "A A", "A A"),
    ]
    for case in cases:
        text, with_input, without = case
        assert checked_format(text) == text, case
        assert question(text, "A", "B") == with_input and question(text, "A", "") == without, case
        assert reads_input(text) is ("B" in with_input), case


def test_what_looks_like_a_placeholder_in_a_row_stays():
    assert question("{instruction}[ {input}]", "{input} [x]", "{{instruction}}") == "{input} [x] {{instruction}}"


def test_what_cannot_be_a_format_is_refused_with_the_reason():
    cases = [
        ("", "no {instruction}"),
        ("[{input}]", "no {instruction}"),
        ("{{instruction}}", "no {instruction}"),
        ("{instruction} {input}", "{input} outside square brackets"),
        ("[{instruction}]", "{instruction} within square brackets"),
        ("{instruction}[ {output}]", "{output} within square brackets"),
        ("{instruction}{}", "{} outside square brackets"),
        ("{instruction}[", "a single ["),
        ("{instruction}]", "a single ]"),
        ("{instruction}[a[b]]", "a single ["),
        ("{instruction} {", "{ outside square brackets"),
        ("{instruction}[\\n{input}]", r"\n as two characters"),
    ]
    for text, reason in cases:
        with pytest.raises(ValueError) as refused:
            checked_format(text)
        assert str(refused.value).startswith(reason), (text, reason)
