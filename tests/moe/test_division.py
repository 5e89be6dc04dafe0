"""The division of a layer's experts between the CPU and the link (`moe/division.py`)."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from moedge.moe.division import ExpertSeconds, divide

times = st.floats(1e-6, 1e-2)


@given(st.lists(st.integers(1, 9), max_size=7), times, times, times, times)
def test_no_other_division_ends_earlier(
    rows: list[int], link_s: float, read_s: float, row_s: float, layer_s: float
) -> None:
    """Compared with every subset, not only with those of the fewest rows."""
    seconds = ExpertSeconds(link_s, read_s, row_s, layer_s)
    count, ends = divide(sorted(rows), seconds)
    others = []
    for chosen in product((False, True), repeat=len(rows)):
        computed = sum(max(read_s, each * row_s) for each, here in zip(rows, chosen, strict=True) if here)
        others.append(max(computed + layer_s * any(chosen), (len(rows) - sum(chosen)) * link_s))
    assert 0 <= count <= len(rows)
    assert ends <= min(others) * (1 + 1e-9)


def test_a_slow_processor_computes_nothing() -> None:
    assert divide([1, 1, 8], ExpertSeconds(1e-3, 1e-2, 1e-2, 1e-4)) == (0, 3e-3)


def test_both_sides_end_together() -> None:
    assert divide([1] * 9, ExpertSeconds(2.0, 1.0, 0.1, 0.0)) == (6, 6.0)
