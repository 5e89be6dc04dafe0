"""A document: the text of one file with its pages, or the reason why there is none; and `split`: text to chunks that a
prompt can hold, cut where the text has its own boundaries. Nothing is ever left out.

Chunks are substrings: those of a text cover it, each is at most `limit` long by the caller's own measure, and each
knows its offsets and its pages. Cuts are chosen greedily: the best kind of boundary in the last part of what fits.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

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
    def of(cls, source: str, sha256: str, content: Content) -> Self:
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


# The length of a text, in tokens or anything else that does not shrink where text is added.
Length = Callable[[str], int]


class Boundary(IntEnum):
    """The better kind is the larger number."""

    CHARACTER = 0
    WORD = 1
    SENTENCE = 2
    LINE = 3
    PARAGRAPH = 4
    PAGE = 5
    HEADING = 6


@dataclass(frozen=True, slots=True)
class Chunk:
    """`text` is text[start:end] of the whole; `pages` are its first and last page, None for texts without pages.

    `boundary` is where it begins.
    """

    index: int
    start: int
    end: int
    text: str
    pages: tuple[int, int] | None = None
    boundary: Boundary = Boundary.HEADING


# A chunk is cut at the best boundary behind this share of what fits into it.
_LEAST_FILL = 0.5
# Each match begins where a unit of the text may begin.
_HEADING = re.compile(r"^(?=#{1,6} \S)", re.MULTILINE)
_SETEXT = re.compile(r"^(?=\S[^\n]*\n(?:={3,}|-{3,})[ \t]*$)", re.MULTILINE)
_PARAGRAPH = re.compile(r"\n[ \t]*\n\s*")
_LINE = re.compile(r"\n")
_SENTENCE = re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？]")  # noqa: RUF001 (as texts have them)
_WORD = re.compile(r"\s+")


def split(
    text: str, limit: int, length: Length, *, overlap: int = 0, page_starts: tuple[int, ...] = ()
) -> Iterator[Chunk]:
    """Chunks of at most `limit` by `length`, in their order; a text that fits is one chunk, an empty one is none.

    Every chunk but the first begins with up to `overlap` of the end of the one before it, from a boundary on.
    `length` is called for pieces of about the limit, a few times for each chunk. Raises ValueError where `overlap` is
    not less than half the limit, or a single character is longer than the limit.
    """
    if limit < 1 or overlap < 0 or 2 * overlap >= max(limit, 2):
        raise ValueError(f"the overlap ({overlap}) must be less than half the limit ({limit}), and both not negative")
    boundaries = _Boundaries(text, page_starts)
    start = index = 0
    covered, kind = 0, Boundary.HEADING
    while covered < len(text):
        end = _end(text, start, covered, limit, length, boundaries)
        yield Chunk(index, start, end, text[start:end], pages_between(page_starts, start, end), kind)
        if end == len(text):
            return
        start = _overlap_start(text, max(start + 1, covered), end, overlap, length, boundaries)
        kind = boundaries.kind(start)
        index, covered = index + 1, end


class _Boundaries:
    """Where units of a text begin, by kind."""

    def __init__(self, text: str, page_starts: tuple[int, ...]) -> None:
        found: dict[int, Boundary] = {}
        for kind, pattern in (
            (Boundary.WORD, _WORD),
            (Boundary.LINE, _LINE),
            (Boundary.SENTENCE, _SENTENCE),
            (Boundary.PARAGRAPH, _PARAGRAPH),
        ):
            for match in pattern.finditer(text):
                found[match.end()] = max(kind, found.get(match.end(), kind))
        found |= dict.fromkeys(page_starts, Boundary.PAGE)
        for pattern in (_HEADING, _SETEXT):
            found |= {match.start(): Boundary.HEADING for match in pattern.finditer(text)}
        self._offsets = sorted(found)
        self._kinds = found

    def kind(self, offset: int) -> Boundary:
        return self._kinds.get(offset, Boundary.CHARACTER)

    def between(self, first: int, last: int) -> list[int]:
        """Those from `first` to `last`, in their order."""
        return self._offsets[bisect_left(self._offsets, first) : bisect_left(self._offsets, last + 1)]

    def best(self, first: int, last: int) -> int | None:
        """The last one of the best kind from `first` to `last`."""
        return max(self.between(first, last), key=lambda offset: (self._kinds[offset], offset), default=None)


def _end(text: str, start: int, covered: int, limit: int, length: Length, boundaries: _Boundaries) -> int:
    """Where the chunk from `start` ends, behind `covered`."""
    longest = _longest(text, start, covered, limit, length)
    if longest == len(text):
        return longest
    least = max(covered + 1, start + int((longest - start) * _LEAST_FILL))
    found = boundaries.best(least, longest)
    if found is None:
        found = boundaries.best(covered + 1, longest)
    # A prefix of what fits need not fit where tokens merge across its end.
    for end in (found, longest):
        if end is not None and length(text[start:end]) <= limit:
            return end
    raise ValueError(f"the {limit} of the limit are too few for the text at {start}")


def _longest(text: str, start: int, covered: int, limit: int, length: Length) -> int:
    """The largest end for which text[start:end] was measured to fit, behind `covered`: a search by bisection."""
    fits, too_long = start, len(text) + 1
    guess = min(len(text), max(start + 4 * limit, covered + 1))
    while fits + 1 < too_long:
        if length(text[start:guess]) <= limit:
            fits = guess
            if guess == len(text):
                break
            # Galloping, until something does not fit.
            guess = min(len(text), start + 2 * (guess - start)) if too_long > len(text) else (fits + too_long) // 2
        else:
            too_long = guess
            guess = (fits + too_long) // 2
    if fits <= covered:
        raise ValueError(f"the text at {covered} does not fit into {limit}; give a larger limit, or less overlap")
    return fits


def _overlap_start(text: str, first: int, end: int, overlap: int, length: Length, boundaries: _Boundaries) -> int:
    """Where the chunk behind `end` begins: the first boundary from which on the text up to `end` is short enough."""
    if not overlap:
        return end
    # A token has four characters on average, and seldom more than sixteen.
    offsets = boundaries.between(max(first, end - 16 * overlap), end - 1)
    at = bisect_left(offsets, True, key=lambda offset: length(text[offset:end]) <= overlap)
    return offsets[at] if at < len(offsets) else end
