"""The tokens that may end an answer, found in texts."""

from typing import Any


class Stops:
    """The added tokens of a tokenizer, such as ``<|im_end|>``. Those inside answers, as ``</think>``, are not special.

    Attributes:
        all: these tokens.
        special: those of them that are special.
        eos: the tokenizer's EOS, at which generation always stops; empty if it has none.
        longest: the number of characters of the longest of them.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        self.all = {token.content for token in added}
        self.special = {token.content for token in added if token.special}
        self._lengths = sorted({len(stop) for stop in self.all}, reverse=True)
        self.longest = max(self._lengths, default=0)
        self.eos: str = tokenizer.eos_token or ""

    def within(self, text: str) -> int:
        """How many tokens are in ``text``."""
        return sum(text.count(stop) for stop in self.all)

    def before(self, text: str, end: int, start: int = 0) -> str:
        """The token at the end of ``text[start:end]``; an empty string if there is none."""
        words = (text[end - length : end] for length in self._lengths if end - length >= start)
        return next((word for word in words if word in self.all), "")

    def ends_turn(self, text: str, start: int, end: int) -> bool:
        """Whether a token ends ``text[start:end]`` that ends a turn, and not only a part of it, as ``</tool_call>``."""
        stop = self.before(text, end, start)
        if not stop or stop in self.special or stop == self.eos:
            return bool(stop)
        opening = stop.replace("/", "", 1)
        return opening == stop or opening not in text[start:end]

    def at_end(self, text: str, start: int) -> list[int]:
        """The end positions of all tokens at the end of ``text[start:]``, last first. Whitespace is skipped."""
        ends: list[int] = []
        end = len(text.rstrip())
        while stop := self.before(text, end, start):
            ends.append(end)
            end = start + len(text[start : end - len(stop)].rstrip())
        return ends

    def with_next(self, text: str, end: int) -> int:
        """The end of an answer: ``end``, or the end of the token after it if ``text[:end]`` has no end-of-turn token.

        In some templates the token that opens the next turn is what ends an answer.
        """
        before = self.before(text, end)
        at = end
        while text[at : at + 1].isspace():
            at += 1
        stops = set() if before in self.special else self.special
        words = (text[at : at + length] for length in self._lengths)
        return next((at + len(word) for word in words if word in stops), end)
