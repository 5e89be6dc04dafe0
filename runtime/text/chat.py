"""A conversation to the pieces of a prompt, through the model's chat template. Knows no token ids."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any

from ..settings.errors import TemplateError
from .control_tokens import ControlTokens, Marks, Piece, Span
from .limits import check_text
from .messages import Message, has_parts, joined_parts, read_messages, texts, with_texts
from .template import TemplateRenderer

_PROBE = "a word no template has: Zvqxj"


class ChatTemplate:
    """The chat template `source`, in which only the template itself can write control tokens.

    A template that deletes characters inside a text, or changes their case, can still assemble a control token from
    harmless text; none of the supported families does.
    """

    def __init__(self, source: str, special_tokens: dict[str, Any], controls: ControlTokens, now: datetime) -> None:
        self._source = source
        self._controls = controls
        self._renderer = TemplateRenderer(source, special_tokens, now)
        self._takes_parts: bool | None = None

    def pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """The prompt for the next answer, cut where text imitates control tokens. Raises `PromptError`."""
        chat = read_messages(messages)
        check_text("".join(texts(chat)), "the conversation")
        if has_parts(chat) and not self._accepts_parts():
            chat = joined_parts(chat)
        contents = texts(chat)
        spans = list(_foreign(self._controls.spans("".join(contents)), chat))
        if not spans:
            return [Piece(self._render(chat), literal=False)]
        marks = Marks(contents, spans, avoid=self._source)
        return list(marks.pieces(self._render(with_texts(chat, marks.texts))))

    def close(self) -> None:
        """Ends the template's process."""
        self._renderer.close()

    def _render(self, chat: Sequence[dict[str, Any]]) -> str:
        text = self._renderer.render(chat)
        check_text(text, "the rendered prompt")
        return text

    def _accepts_parts(self) -> bool:
        # Templates for plain texts print a list of parts as Python would; the probe shows it, the source does not.
        if self._takes_parts is None:
            content = [{"type": "text", "text": _PROBE}]
            try:
                prompt = self._renderer.render([{"role": "user", "content": content}])
            except TemplateError:
                prompt = ""
            self._takes_parts = _PROBE in prompt and "'type'" not in prompt and '"type"' not in prompt
        return self._takes_parts


def _foreign(spans: Sequence[Span], chat: Sequence[Message]) -> Iterator[Span]:
    """The spans that the model did not write.

    Tokens that are not special, such as `<think>`, are part of the text of an answer: they come back with it in the
    assistant's turns, where templates look for them.
    """
    ends = list(accumulate(sum(map(len, texts([message]))) for message in chat))
    for span in spans:
        turn = bisect_right(ends, span.start)
        whole = span.stop <= ends[turn]
        if span.special or not whole or chat[turn]["role"] != "assistant":
            yield span
