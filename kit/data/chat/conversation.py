"""The renderings of the beginnings of a conversation: of its first message, its first two, and so on."""

from kit.data.chat.template import Messages, Span, Template, Tools

MAX_RENDERED = 1 << 27  # characters of the beginnings of one conversation: seconds, and memory


class Conversation:
    """The messages of a conversation, and the renderings of their beginnings, each made once."""

    def __init__(self, template: Template, messages: Messages, tools: Tools) -> None:
        """See the class."""
        self.messages = messages
        self.tools = tools
        self._template = template
        # By the number of messages, with or without the generation prompt, and with marks.
        self._texts: dict[tuple[int, bool, bool], str] = {}

    def render(self, num: int, add_generation_prompt: bool = False, has_marks: bool = False) -> str:
        """Return the rendering of the first ``num`` messages, as ``Template.render`` does."""
        asked = num, add_generation_prompt, has_marks
        if asked not in self._texts:
            beginning = self.messages[:num]
            self._texts[asked] = self._template.render(beginning, self.tools, add_generation_prompt, has_marks)
            if sum(map(len, self._texts.values())) > MAX_RENDERED:
                raise self._template.too_long(MAX_RENDERED)
        return self._texts[asked]

    def render_marked(self, num: int) -> tuple[str, list[Span]]:
        """Return the rendering of the first ``num`` messages, and the span of each ``{% generation %}`` block in it.

        Raises ``UserError`` if the template fails, or if its blocks cannot be located.
        """
        text = self.render(num)
        return text, self._template.located(self.render(num, has_marks=True), text)
