"""The laws of bench/scale.py: slopes of known curves, and costs that are counted instead of timed."""

import pytest

from bench import scale
from moedge.runtime.kv.allocator import BlockAllocator


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_slope_is_the_power_of_the_last_decade(power: float) -> None:
    """A cost that does not grow hides the slope of small x only."""
    assert scale.fitted_slope([(x, 3.0 * x**power) for x in (10, 100, 300, 1000)]) == pytest.approx(power)
    assert scale.fitted_slope([(x, 1e3 + x**power) for x in (1e5, 1e6, 1e7)]) == pytest.approx(power, abs=0.01)
    assert scale.fitted_slope([(1.0, 2.0)]) == 0.0


def test_what_is_drawn_is_what_was_recorded() -> None:
    points = [(100.0, 1e-4), (1000.0, 1e-3)]
    laws = [scale.Law("rows", "a job", "rows", "s", points), scale.Law("rows", "memory", "rows", "bytes", points)]
    record = scale.record_of(laws)
    assert scale.laws_of(record) == laws
    assert "| a job | 1,000 rows | 1 ms | 1.00 |" in scale.table(laws)
    page = scale.page(record)
    assert "Time by rows" in page
    assert "Bytes by rows" in page
    assert page.count("<circle") == 4


def test_a_row_that_finds_no_memory_looks_up_one_block_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one for each block of its prompt."""
    looked: list[bytes] = []
    find = BlockAllocator.find

    def counted(self: BlockAllocator, content: bytes) -> int | None:
        looked.append(content)
        return find(self, content)

    monkeypatch.setattr(BlockAllocator, "find", counted)
    scale.blocked_seconds(64 * scale.BLOCK)
    assert 0 < len(looked) <= 2 * 64
