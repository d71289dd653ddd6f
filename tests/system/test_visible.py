"""Untrusted text is shown completely, and has no effect on a terminal."""

from kit.system.visible import Layout, joined, one_line, visible


def test_control_characters_are_shown_as_escapes():
    cases = [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("over\rwritten", r"over\rwritten"),
        ("a\x08\x00\x7f", r"a\x08\x00\x7f"),
        ("\x9b31m", r"\x9b31m"),  # begins a sequence too
        ("\x9d0;title\x9c", r"\x9d0;title\x9c"),
        ("a\u202eb\u2066c\u2069", r"a\u202eb\u2066c\u2069"),
        ("\ufeffid", r"\ufeffid"),
        ("file\udcff", r"file\udcff"),
        ("a\u2028b\x85c\x0bd\x0ce", r"a\u2028b\x85c\x0bd\x0ce"),
    ]
    for text, shown in cases:
        assert visible(text) == one_line(text) == shown == visible(shown), (text, shown)


def test_letters_of_all_scripts_stay_as_they_are():
    for text in [
        "plain",
        "汉字 日本語",
        "مرحبا",
        "שלום\u200f",
        "नमस्ते",
        "e\u0301",
        "👩\u200d👩\u200d👧 🏳️",
        "a\tb",
        "½ ≠ «x»",
    ]:
        assert visible(text) == one_line(text) == text, text


def test_a_line_break_starts_a_line_only_in_a_layout_of_the_kit():
    assert visible("a\nb") == "a\nb" and one_line("a\nb") == r"a\nb"
    both = joined(["a\nb", "c\x1b"], "\n  ")
    assert both == "a\\nb\n  c\\x1b" and one_line(both) == both and isinstance(one_line(both), Layout)
    assert one_line(f"{both}") == r"a\nb\n  c\x1b"  # put into other text, it is no layout any more
