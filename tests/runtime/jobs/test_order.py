"""Rows run in an order that is fast (`runtime/jobs/order.py`): shared prefixes side by side, long before short, those
of a mixture beside similar ones, every row once.
"""

import inspect
import itertools
import random
import re
import tarfile
from pydoc_data.topics import topics
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from moedge.runtime.jobs.order import LEVELS, WINDOW, SpeedOrder


def order_of(rows: list[tuple[list[int], int]], mixture: bool = False) -> list[int]:
    order = SpeedOrder(mixture)
    for row, (prompt, length) in enumerate(rows):
        order.add(row, prompt, length)
    return list(order.rows())


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 2**62))), st.booleans())
def test_every_row_comes_once(rows: list[tuple[list[int], int]], mixture: bool) -> None:
    assert sorted(order_of(rows, mixture)) == list(range(len(rows)))


def test_long_rows_come_first_where_nothing_is_shared() -> None:
    lengths = [5, 90, 7, 90, 1]
    assert order_of([([i] * 40, length) for i, length in enumerate(lengths)]) == [1, 3, 2, 0, 4]


def test_rows_that_begin_alike_run_side_by_side() -> None:
    generator = random.Random(1)
    documents = [[generator.randrange(250) for _ in range(300)] for _ in range(5)]
    rows = [(documents[row % 5] + [row], generator.randint(300, 400)) for row in range(50)]
    groups = [row % 5 for row in order_of(rows)]
    assert sum(a != b for a, b in itertools.pairwise(groups)) == 4
    assert sum(a != b for a, b in zip([row % 5 for row in range(50)], [row % 5 for row in range(1, 50)], strict=False))


def test_a_common_instruction_does_not_hide_common_documents() -> None:
    """All rows share the first level, so the second one decides, and where it is not shared the length."""
    instruction = [7] * LEVELS[0]
    shared = instruction + [9] * LEVELS[1]
    rows = [(shared, 500), ([*instruction, 1], 999), (shared, 10), ([*instruction, 2], 100), ([*instruction, 3], 600)]
    assert order_of(rows) == [1, 4, 0, 2, 3]


def test_rows_without_a_prompt_come_where_their_length_says() -> None:
    assert order_of([([1] * 40, 50), ([], 1 << 62), ([2] * 40, 60)]) == [1, 2, 0]


def words(text: str, count: int) -> list[list[int]]:
    """Pieces of a text of 40 words each, which stand for tokens."""
    ids = [crc32(word.encode()) % 49_152 for word in re.findall(r"\w+|[^\w\s]", text)]
    return [ids[at : at + 40] for at in range(0, 40 * count, 40)]


# An instruction that every row has, and texts of two kinds: prose and source code.
SHARED = words(
    "Say in one sentence what follows is about, for a reader who has not seen it. Answer in English. " * 3, 1
)[0]
KINDS = [words(text, 96) for text in ("".join(topics.values()), inspect.getsource(tarfile))]


def share_of_one_kind(order: list[int], size: int) -> float:
    """How much of passes of `size` rows is of their most frequent kind, in the mean."""
    passes = [[row % len(KINDS) for row in order[at : at + size]] for at in range(0, len(order), size)]
    return sum(max(map(each.count, each)) for each in passes) / len(order)


def test_rows_of_a_mixture_with_similar_words_run_side_by_side() -> None:
    rows = [(SHARED + text, 300 + text[0] % 40) for texts in zip(*KINDS, strict=True) for text in texts]
    for size in (16, 32):
        assert share_of_one_kind(order_of(rows), size) < 0.75
        assert share_of_one_kind(order_of(rows, mixture=True), size) > 0.85


def test_similar_rows_change_places_among_those_of_their_length_alone() -> None:
    rows = [(SHARED + text, 300 if number % 2 else 900) for number, text in enumerate(itertools.chain(*KINDS))]
    lengths = [rows[row][1] for row in order_of(rows, mixture=True)]
    assert lengths == sorted(lengths, reverse=True)
    many = [([row % 7] * 33, 4000 - row // 4) for row in range(3 * WINDOW)]
    order = order_of(many, mixture=True)
    assert order != order_of(many)
    for begin in range(0, len(order), WINDOW):
        assert sorted(order[begin : begin + WINDOW]) == sorted(order_of(many)[begin : begin + WINDOW])


def test_rows_with_a_common_document_stay_together_in_a_mixture() -> None:
    """Questions after a document are of any kind: the document decides."""
    documents = [list(itertools.chain(*KINDS[kind][at : at + 7])) for kind in range(2) for at in (0, 7, 14)]
    questions = list(itertools.chain(*KINDS))
    rows = [(documents[row % 6] + questions[row], 400) for row in range(96)]
    groups = [row % 6 for row in order_of(rows, mixture=True)]
    assert sum(a != b for a, b in itertools.pairwise(groups)) == 5
