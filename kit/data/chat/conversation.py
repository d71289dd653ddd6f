"""The renderings of the beginnings of a conversation: of its first message, its first two, and so on."""

from collections.abc import Sequence

from kit.data.chat.template import Messages, Span, Template, Tools
from kit.system.errors import UserError

MAX_RENDERED = 1 << 27  # characters of the beginnings of one conversation: seconds, and memory

Beginning = tuple[int, bool, bool]  # the number of messages; with the generation prompt; with marks


class Conversation:
    """The messages of a conversation up to its last answer, and the renderings of their beginnings.

    Those that are needed to find the answers are made many at a time: to ask the process that renders takes longer than
    to render.
    """

    def __init__(self, template: Template, messages: Messages, tools: Tools, answers: Sequence[int] = ()) -> None:
        """
        Args:
            answers: the numbers of the answers that will be looked for, in this order.
        """
        self.messages = messages
        self.tools = tools
        self._template = template
        self._needed: list[Beginning] = []  # in the order in which they will be asked for
        for i in answers:
            self._needed += [(i + 1, False, True)] if template.marks_answers else []
            self._needed += [(i + 1, False, False), (i, True, False)] if i else [(1, False, False)]
        self._texts: dict[Beginning, str] = {}  # those made last
        self._num_rendered = 0  # characters

    def render(self, num: int, add_generation_prompt: bool = False) -> str:
        """Return the rendering of the first ``num`` messages, as ``Template.render`` does."""
        return self._text((num, add_generation_prompt, False))

    def render_marked(self, num: int) -> tuple[str, list[Span]]:
        """Return the rendering of the first ``num`` messages, and the span of each ``{% generation %}`` block in it.

        Raises ``UserError`` if the template fails, or if its blocks cannot be located.
        """
        marked, text = self._text((num, False, True)), self._text((num, False, False))
        return text, self._template.located(marked, text)

    def _text(self, asked: Beginning) -> str:
        if asked not in self._texts and asked in self._needed:
            needed = self._needed[self._needed.index(asked) :]
            self._texts.clear()
            try:
                self._make(needed)
            except UserError:  # of one of them: each is made when it is asked for
                self._needed = []
        if asked not in self._texts:
            self._make([asked])
        return self._texts[asked]

    def _make(self, beginnings: Sequence[Beginning]) -> None:
        texts = self._template.render_beginnings(self.messages, self.tools, beginnings)
        self._num_rendered += sum(map(len, texts))
        if self._num_rendered > MAX_RENDERED:
            raise self._template.too_long(MAX_RENDERED)
        self._texts |= zip(beginnings, texts, strict=False)  # of long texts only the first ones were made
