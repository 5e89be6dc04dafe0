"""The ring's places: never two on one byte, always room when nothing is held, freed in the order they were taken."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedge.offload.stream.lane import ALIGNMENT, Place, Ring

PAGES = 12
SIZES = st.integers(1, PAGES * ALIGNMENT)


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@given(st.lists(st.one_of(SIZES, st.none()), max_size=200))
def test_live_places_never_overlap_nor_leave_the_ring(moves: list[int | None]) -> None:
    """None releases the oldest place, a number asks for a place of that size."""
    ring, live = Ring(PAGES * ALIGNMENT), deque[Place]()
    for nbytes in moves:
        if nbytes is None:
            if live:
                ring.release(live.popleft())
        elif place := ring.try_reserve(nbytes):
            assert place.nbytes == nbytes
            assert place.offset % ALIGNMENT == 0
            assert place.offset >= 0
            assert place.offset + padded(nbytes) <= ring.capacity
            for other in live:
                assert place.offset >= other.offset + padded(other.nbytes) or other.offset >= place.offset + padded(
                    nbytes
                )
            live.append(place)
        else:
            assert live, "an empty ring had no room"


@given(st.lists(st.integers(1, PAGES * ALIGNMENT // 2), min_size=1, max_size=100), st.data())
def test_a_refusal_means_that_the_room_is_really_in_use(sizes: list[int], data: st.DataObject) -> None:
    """The model: bytes free behind the youngest place, up to the ring's end or from its start to the oldest place."""
    ring, live = Ring(PAGES * ALIGNMENT), deque[Place]()
    for nbytes in sizes:
        while not (place := ring.try_reserve(nbytes)):
            oldest, youngest = live[0].offset, live[-1].offset + padded(live[-1].nbytes)
            runs = [oldest - youngest] if youngest <= oldest else [ring.capacity - youngest, oldest]
            assert padded(nbytes) > max(runs)
            ring.release(live.popleft())
        live.append(place)
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
    assert ring.try_reserve(1) is None, "the two pages skipped at the end are free only with the place before them"
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
