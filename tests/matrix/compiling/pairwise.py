"""Few combinations of settings in which every two values of different settings meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def pairwise(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Rows with a value for each factor; every pair of values that an `allowed` row can have is in one of them.

    Greedy and without chance: a row starts with a pair that is missing and takes, factor by factor, the value that
    brings most missing pairs.
    """
    names = list(factors)
    missing = {pair for two in itertools.combinations(names, 2) for pair in _pairs_of(two, factors)}
    rows: list[Row] = []
    for pair in sorted(missing, key=str):
        if pair in missing and (row := _fill(dict(pair), names, factors, missing, allowed)):
            rows.append(row)
            missing -= _pairs_in(row, names)
    return rows


def _fill(row: Row, names: list[str], factors: Mapping[str, Sequence[Any]], missing: set, allowed: Callable) -> Row:
    """The row, completed, or {} where no completion is allowed."""
    free = [name for name in names if name not in row]
    if not free:
        return {name: row[name] for name in names} if allowed(row) else {}

    def gain(value: Any) -> int:
        return len(missing & _pairs_in(row | {free[0]: value}, names))

    for value in sorted(factors[free[0]], key=gain, reverse=True):
        if found := _fill(row | {free[0]: value}, names, factors, missing, allowed):
            return found
    return {}


def _pairs_of(two: tuple[str, str], factors: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    first, second = two
    return [((first, a), (second, b)) for a in factors[first] for b in factors[second]]


def _pairs_in(row: Row, names: list[str]) -> set[tuple[Any, ...]]:
    return set(itertools.combinations([(name, row[name]) for name in names if name in row], 2))
