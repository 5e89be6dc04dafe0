"""The collector rests for a while and is then as it was, however the while ends (`offload/memory.py`)."""

import gc

import pytest

from moedge.offload.memory import gc_paused


def fail() -> None:
    with gc_paused():
        assert not gc.isenabled()
        raise ValueError("in between")


@pytest.mark.parametrize("before", [True, False])
def test_the_collector_is_as_it_was_afterwards(before: bool) -> None:
    was = gc.isenabled()
    try:
        gc.enable() if before else gc.disable()
        with pytest.raises(ValueError, match="in between"):
            fail()
        assert gc.isenabled() is before
    finally:
        gc.enable() if was else gc.disable()
