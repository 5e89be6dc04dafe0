"""The slots of the ring (`offload/stream/stream.py`): they never overlap, an empty ring always has one, and they are
released in order.
"""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedge.offload.stream.stream import ALIGNMENT, Ring, Slot

PAGES = 12
SIZES = st.integers(1, PAGES * ALIGNMENT)


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@given(st.lists(st.one_of(SIZES, st.none()), max_size=200))
def test_live_places_never_overlap_nor_leave_the_ring(moves: list[int | None]) -> None:
    """None releases the oldest slot, a number reserves a slot of that size."""
    ring, live = Ring(PAGES * ALIGNMENT), deque[Slot]()
    for nbytes in moves:
        if nbytes is None:
            if live:
                ring.release(live.popleft())
        elif slot := ring.try_reserve(nbytes):
            assert slot.nbytes == nbytes
            assert slot.offset % ALIGNMENT == 0
            assert slot.offset >= 0
            assert slot.offset + padded(nbytes) <= ring.capacity
            for other in live:
                assert slot.offset >= other.offset + padded(other.nbytes) or other.offset >= slot.offset + padded(
                    nbytes
                )
            live.append(slot)
        else:
            assert live, "an empty ring had no free slot"


@given(st.lists(st.integers(1, PAGES * ALIGNMENT // 2), min_size=1, max_size=100), st.data())
def test_a_refusal_means_that_the_bytes_are_really_in_use(sizes: list[int], data: st.DataObject) -> None:
    """The model: bytes free behind the youngest slot, up to the ring's end or from its start to the oldest slot."""
    ring, live = Ring(PAGES * ALIGNMENT), deque[Slot]()
    for nbytes in sizes:
        while not (slot := ring.try_reserve(nbytes)):
            oldest, youngest = live[0].offset, live[-1].offset + padded(live[-1].nbytes)
            runs = [oldest - youngest] if youngest <= oldest else [ring.capacity - youngest, oldest]
            assert padded(nbytes) > max(runs)
            ring.release(live.popleft())
        live.append(slot)
        if data.draw(st.booleans()):
            ring.release(live.popleft())


def test_a_place_that_would_cross_the_end_begins_at_the_start() -> None:
    ring = Ring(10 * ALIGNMENT)
    first, second = ring.try_reserve(4 * ALIGNMENT), ring.try_reserve(4 * ALIGNMENT)
    assert first is not None
    assert second is not None
    assert ring.try_reserve(4 * ALIGNMENT) is None
    ring.release(first)
    third = ring.try_reserve(4 * ALIGNMENT)
    assert third is not None
    assert third.offset == 0
    assert ring.try_reserve(1) is None, "the two pages skipped at the end are free only with the slot before them"
    ring.release(second)
    fourth = ring.try_reserve(1)
    assert fourth is not None
    assert fourth.offset == 4 * ALIGNMENT


def test_places_come_back_in_the_order_they_were_taken() -> None:
    ring = Ring(4 * ALIGNMENT)
    first, second = ring.try_reserve(1), ring.try_reserve(1)
    assert first is not None
    assert second is not None
    with pytest.raises(ValueError, match="not the oldest"):
        ring.release(second)
    ring.release(first)
    with pytest.raises(ValueError, match="not the oldest"):
        ring.release(first)


@pytest.mark.parametrize("nbytes", [0, -1, 4 * ALIGNMENT + 1])
def test_a_size_that_never_fits_is_refused_at_once(nbytes: int) -> None:
    with pytest.raises(ValueError, match="capacity"):
        Ring(4 * ALIGNMENT).try_reserve(nbytes)
