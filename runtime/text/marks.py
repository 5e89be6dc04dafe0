"""Marks around imitations of control tokens, so that they can be told from real ones after a template has run.

The technique is that of transformers' `mark_control_tokens` (5.23): two private-use characters travel with the text
through the template; where only one of a pair comes out, it still keeps its two sides apart. Knows no tokenizer.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

from .control import Span
from .errors import PromptError

_PRIVATE_USE = range(0xF0000, 0xFFFFE)


class Piece(NamedTuple):
    """A stretch of a prompt; in a literal one the names of control tokens are mere text."""

    text: str
    literal: bool


class Marks:
    """The marks of one prompt: two characters that occur in none of its texts."""

    def __init__(self, texts: Sequence[str], spans: Sequence[Span], avoid: str) -> None:
        """Marks `spans`, which count characters through all `texts`; `avoid` is text that the template may add.

        Raises `PromptError` if the texts leave no two private-use characters.
        """
        used = set(avoid).union(*texts)
        free = list(islice((chr(code) for code in _PRIVATE_USE if chr(code) not in used), 2))
        if len(free) < 2:
            raise PromptError("The text uses up the private-use characters U+F0000 to U+FFFFD; leave two of them out.")
        self._start, self._stop = free
        self._names: set[str] = set()
        begins = accumulate(map(len, texts), initial=0)
        self._texts = [self._marked(text, begin, spans) for text, begin in zip(texts, begins, strict=False)]

    @property
    def texts(self) -> list[str]:
        """The texts with their marks."""
        return self._texts

    def pieces(self, text: str) -> Iterator[Piece]:
        """`text`, which a template made of the marked texts, cut at the marks and without them."""
        start, stop = self._start, self._stop
        # Split with a group: cut text and marked text take turns, None stands for a mark without its partner.
        for index, part in enumerate(re.split(f"{start}([^{start}{stop}]*){stop}|[{start}{stop}]", text)):
            if part:
                yield Piece(part, literal=index % 2 == 1 and part in self._names)

    def _marked(self, text: str, begin: int, spans: Sequence[Span]) -> str:
        first = bisect_right(spans, begin, key=lambda span: span.stop)
        last = bisect_left(spans, begin + len(text), key=lambda span: span.start)
        parts, done = [], 0
        for span in spans[first:last]:
            # A span may begin in the text before this one, or end in the next.
            start, stop = max(span.start - begin, 0), min(span.stop - begin, len(text))
            name = text[start:stop]
            self._names.add(name)
            parts += [text[done:start], self._start, name, self._stop]
            done = stop
        return "".join([*parts, text[done:]])
