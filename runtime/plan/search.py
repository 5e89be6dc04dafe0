"""Finds where a monotone condition ends."""

from __future__ import annotations

from collections.abc import Callable


def largest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` for which `holds`, which is true up to some number; 1 where none is."""
    low, high = 1, max(most, 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
