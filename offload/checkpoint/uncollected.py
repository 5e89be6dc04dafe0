"""A while without Python's collector of circles. Torch-free."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """For making many objects that form no circle, as descriptions of tensors are.

    The collector would look through all of them again and again while they become more: a third of the time that the
    headers of a large checkpoint take.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
