"""Rows run in an order that is fast (`runtime/jobs/encode.py`): shared prefixes side by side, long before short, every
row once.
"""

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from moedge.runtime.jobs.encode import LEVELS, SpeedOrder


def order_of(rows: list[tuple[list[int], int]]) -> list[int]:
    order = SpeedOrder()
    for row, (prompt, length) in enumerate(rows):
        order.add(row, prompt, length)
    return list(order.rows())


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 2**62))))
def test_every_row_comes_once(rows: list[tuple[list[int], int]]) -> None:
    assert sorted(order_of(rows)) == list(range(len(rows)))


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
