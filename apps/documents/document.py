"""A document: the text of one file with its pages, or the reason why there is none."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from .readers.content import Content, ReadCode

# Between two pages.
PAGE_BREAK = "\n\n"


@dataclass(frozen=True)
class Document:
    """`source` is the path in the folder, `sha256` that of the file. `page_starts` are offsets in `text`, empty for
    types that have no pages."""

    source: str
    sha256: str
    type: str
    text: str
    page_starts: tuple[int, ...] = ()
    front_matter: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, source: str, sha256: str, content: Content) -> Document:
        text = PAGE_BREAK.join(content.pages)
        starts = accumulate((len(page) + len(PAGE_BREAK) for page in content.pages[:-1]), initial=0)
        pages = tuple(starts) if content.paged else ()
        return cls(source, sha256, content.type, text, pages, content.front_matter, content.notes)

    @cached_property
    def num_pages(self) -> int | None:
        """None for types that have no pages."""
        return len(self.page_starts) or None

    def pages(self, start: int, end: int) -> tuple[int, int] | None:
        """The first and the last page of text[start:end], counted from 1; None for types that have no pages."""
        return pages_between(self.page_starts, start, end)


def pages_between(page_starts: tuple[int, ...], start: int, end: int) -> tuple[int, int] | None:
    """The first and the last page of the text from `start` to `end`; a page begins with its first character."""
    if not page_starts:
        return None
    return max(1, bisect_right(page_starts, start)), max(1, bisect_right(page_starts, max(start, end - 1)))


@dataclass(frozen=True, slots=True)
class UnreadDocument:
    """A file without a text. `sha256` is "" where even its bytes could not be read."""

    source: str
    sha256: str
    code: ReadCode
    message: str
