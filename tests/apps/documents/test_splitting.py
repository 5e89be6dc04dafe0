"""Chunks (`apps/documents/document.py`) cover their text, none is over the limit, and they are cut at the boundaries
that the text has.
"""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moedge.apps.documents.document import Boundary, split

TEXTS = st.one_of(
    st.text(max_size=400),
    st.lists(
        st.sampled_from(["Word ", "One. ", "\n", "\n\n", "# Head\n", "unbroken", "Löß ", "。", "\t", "Q? "]),
        max_size=120,
    ).map("".join),
)


def words(text: str) -> int:
    """Like tokens: pieces of at most six characters of words, and every other character by itself."""
    return len(re.findall(r"\w{1,6}| ?[^\w ]| ", text))


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(2, 60), st.integers(0, 29), st.sampled_from([len, words]), st.data())
def test_chunks_cover_the_text(text: str, limit: int, overlap: int, length: object, data: st.DataObject) -> None:
    assert callable(length)
    overlap = min(overlap, (limit - 1) // 2)
    starts = tuple(sorted({0, *data.draw(st.sets(st.integers(0, max(0, len(text) - 1)), max_size=4))}))
    chunks = list(split(text, limit, length, overlap=overlap, page_starts=starts))
    assert bool(chunks) == bool(text)
    covered = 0
    for number, chunk in enumerate(chunks):
        assert chunk.index == number
        assert chunk.text == text[chunk.start : chunk.end]
        assert length(chunk.text) <= limit
        assert chunk.start <= covered < chunk.end
        assert length(text[chunk.start : covered]) <= overlap
        assert chunk.pages is not None
        first, last = chunk.pages
        assert starts[first - 1] <= chunk.start
        assert first == len(starts) or chunk.start < starts[first]
        assert starts[last - 1] <= chunk.end - 1
        assert last == len(starts) or chunk.end <= starts[last]
        covered = chunk.end
    assert covered == len(text)
    if length(text) <= limit and text:
        assert [chunk.text for chunk in chunks] == [text]


def cuts(text: str, limit: int, **options: int) -> list[str]:
    return [chunk.text for chunk in split(text, limit, len, **options)]


def test_the_best_boundary_is_chosen() -> None:
    assert cuts("A a.\n\n# One\nB b. C c.\n# Two\nD d. E e.", 24) == ["A a.\n\n# One\nB b. C c.\n", "# Two\nD d. E e."]
    assert cuts("One two. Three four. Five six.", 24) == ["One two. Three four. ", "Five six."]
    assert cuts("First line\nand more\n\nNext here", 26) == ["First line\nand more\n\n", "Next here"]
    assert cuts("one two three four", 10) == ["one two ", "three four"]
    assert cuts("一二三。四五六。七八九。", 9) == ["一二三。四五六。", "七八九。"]
    assert cuts("abcdefghij", 4) == ["abcd", "efgh", "ij"]


def test_a_page_is_better_than_a_later_paragraph() -> None:
    text = "Page one.\n\nMore of it.\n\nPage two.\n\nThe end."
    first, second = split(text, 36, len, page_starts=(0, 24))
    assert (first.text, first.pages) == (text[:24], (1, 1))
    assert (second.text, second.pages, second.boundary) == (text[24:], (2, 2), Boundary.PAGE)


def test_chunks_overlap_from_a_boundary_on() -> None:
    assert cuts("One two. Three four. Five six. Seven.", 22, overlap=10) == [
        "One two. Three four. ",
        "four. Five six. Seven.",
    ]


@pytest.mark.parametrize(("limit", "overlap"), [(0, 0), (10, 5), (10, -1)])
def test_limits_that_cannot_work_are_refused(limit: int, overlap: int) -> None:
    with pytest.raises(ValueError, match="overlap"):
        list(split("text", limit, len, overlap=overlap))


def test_a_character_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit into 2"):
        list(split("abc", 2, lambda text: 3 * len(text)))


def test_length_is_called_few_times() -> None:
    calls: list[int] = []

    def length(text: str) -> int:
        calls.append(len(text))
        return len(text.split())

    text = "A sentence of several words. " * 4000
    chunks = list(split(text, 1000, length, overlap=50))
    assert len(chunks) > 20
    assert len(calls) < 60 * len(chunks)
    assert sum(calls) < 200 * len(text)
