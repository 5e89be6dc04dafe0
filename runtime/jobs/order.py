"""The order in which rows of a job run: shared prefixes together, long rows first, and alike rows side by side."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

# Prefix lengths, in tokens, at which rows are compared: from a common instruction to a common document.
LEVELS = (32, 256, 2048)
_MAX = (1 << 64) - 1
# A sketch says which of so many bins the tokens of a prompt are in, of which it takes as many, evenly spread.
SKETCH_BINS = 512
SKETCH_TOKENS = 128
# Rows that may change places: so many, of which the shortest has this share of the longest one's tokens.
WINDOW = 1024
SIMILAR_LENGTH = 0.8
# Fewer rows than generate together need no order.
_LEAF = 8
# Rounds of power iteration: where two axes are nearly equal, either divides the rows well.
_ROUNDS = 20

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]


class SpeedOrder:
    """The fastest order of rows. Takes 40 bytes per row, of a mixture 104.

    Rows with a common beginning run side by side, so that their common blocks are computed once while they are in the
    cache. Long rows run first, because the end of a job waits for its longest row: the shorter the last rows are, the
    fewer sequences are missing from its last passes.

    Of a mixture, rows whose prompts have similar tokens run side by side too, within windows of rows of similar length:
    they choose the same experts, so that a pass reads fewer (`python -m bench.row_order`).
    """

    def __init__(self, mixture: bool = False) -> None:
        self._rows = array("Q")
        self._lengths = array("Q")
        self._prefixes = tuple(array("Q") for _ in LEVELS)
        self._sketches = bytearray() if mixture else None

    def add(self, row: int, prompt_ids: Sequence[int], num_tokens: int) -> None:
        """`num_tokens` is the most that the row may come to, prompt included."""
        self._rows.append(row)
        self._lengths.append(num_tokens)
        for level, hashes in zip(LEVELS, self._prefixes, strict=True):
            # Never 0, which is a prompt that is shorter. Equal in every process: integers hash to what they are.
            hashes.append((hash(tuple(prompt_ids[:level])) & _MAX | 1) if len(prompt_ids) >= level else 0)
        if self._sketches is not None:
            self._sketches += sketch(prompt_ids)

    def rows(self) -> Iterable[int]:
        """Every row added, the first to run first."""
        rows, lengths = np.asarray(self._rows), np.asarray(self._lengths)
        # The last key is the first to sort by.
        keys, units = [rows, _descending(lengths)], np.zeros(len(rows), np.uint64)
        for level, hashes in reversed(list(zip(LEVELS, self._prefixes, strict=True))):
            shared, longest = _shared(np.asarray(hashes), lengths)
            keys += [shared, _descending(longest)]
            if level > LEVELS[0]:
                units = np.where(units == 0, shared, units)
        order = np.lexsort(keys)
        if self._sketches:
            bits = np.frombuffer(self._sketches, np.uint8).reshape(len(rows), SKETCH_BINS // 8)
            windows = np.split(order, _ends(lengths[order].tolist()))
            order = np.concatenate([window[alike(bits[window], units[window])] for window in windows])
        return map(int, rows[order])


def _ends(lengths: Sequence[int]) -> list[int]:
    """Where windows end, and the next ones begin, in rows of these lengths."""
    ends, begin, longest = [], 0, 0
    for row, length in enumerate(lengths):
        if row - begin == WINDOW or length < SIMILAR_LENGTH * longest:
            ends.append(row)
            begin, longest = row, 0
        longest = max(longest, length)
    return ends


def sketch(prompt_ids: Sequence[int]) -> bytes:
    """The bins that tokens of a prompt are in, as SKETCH_BINS bits."""
    some = np.asarray(prompt_ids[:: max(1, len(prompt_ids) // SKETCH_TOKENS)], np.uint64)
    found = np.zeros(SKETCH_BINS, np.uint8)
    # Multiplicative hashing (Knuth, The Art of Computer Programming 3, 6.4): neighbours are in bins of their own.
    found[(some * np.uint64(2654435769) % np.uint64(1 << 32)) >> np.uint64(23)] = 1
    return np.packbits(found).tobytes()


def alike(sketches: NDArray[np.uint8], units: NDArray[np.uint64]) -> Rows:
    """An order of n rows, whose sketches are uint8 [n, SKETCH_BINS / 8], in which similar ones are neighbours.

    Bins count the more, the fewer rows are in them. Rows are divided at the median of their first principal axis, and
    both halves again (Boley, Principal Direction Divisive Partitioning, 1998). Rows of one of `units` [n], other than
    0, stay together, in their order: a unit is divided as one row, which has the mean of their sketches.
    """
    found = np.unpackbits(sketches, axis=1).astype(np.float32)
    found *= np.log(len(found) / np.maximum(found.sum(0), 1))
    found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-9)
    # Hashes of prefixes are far above numbers of rows.
    _, unit = np.unique(np.where(units == 0, np.arange(len(units), dtype=np.uint64), units), return_inverse=True)
    means = np.zeros((unit.max() + 1, SKETCH_BINS), np.float32)
    np.add.at(means, unit, found)
    means /= np.bincount(unit)[:, None]
    place = np.empty(len(means), np.int64)
    place[_divide(means, np.arange(len(means)))] = np.arange(len(means))
    return np.argsort(place[unit], kind="stable")


def _divide(found: Floats, rows: Rows) -> Rows:
    if len(rows) <= _LEAF:
        return rows
    along = rows[np.argsort(_principal(found[rows]), kind="stable")]
    middle = len(rows) // 2
    return np.concatenate([_divide(found, np.sort(half)) for half in (along[:middle], along[middle:])])


def _principal(found: Floats) -> Floats:
    """Where rows [n, d] lie on the axis along which they differ most, about: [n]."""
    mean = found.mean(0)
    places: Floats = found @ found[0]
    for _ in range(_ROUNDS):
        places -= places.mean()
        axis = found.T @ places
        places = found @ axis - mean @ axis
        places /= max(float(np.linalg.norm(places)), 1e-9)
    return places


def _shared(hashes: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """(hash where another row has it too, else 0; the longest row of the group, or the row's own length)."""
    _, group, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    longest = np.zeros(len(counts), np.uint64)
    np.maximum.at(longest, group, lengths)
    alone = (counts[group] < 2) | (hashes == 0)
    return np.where(alone, 0, hashes), np.where(alone, lengths, longest[group])


def _descending(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return np.uint64(_MAX) - values
