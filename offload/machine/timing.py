"""Times functions that a higher floor passes in, and measures how fast host memory is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

# A case takes a number of rows and returns a function that multiplies once; it returns when a device is done, too.
Case = Callable[[int], Callable[[], None]]


def measure_rates(
    cases: Mapping[str, Case], rows: Sequence[int], flop_per_row: int, seconds: float = 0.1
) -> dict[str, dict[int, float]]:
    """The FLOP/s of each case by number of rows; `flop_per_row` is 2 x inputs x outputs of the multiplied matrix."""
    return {
        name: {num: num * flop_per_row / best_seconds(case(num), seconds) for num in rows}
        for name, case in cases.items()
    }


def best_seconds(run: Callable[[], object], seconds: float = 0.1) -> float:
    """The time of the fastest run within `seconds`, after one warm-up run; slower runs were disturbed."""
    run()
    best = float("inf")
    deadline = time.perf_counter() + seconds
    while True:
        begun = time.perf_counter()
        run()
        ended = time.perf_counter()
        best = min(best, ended - begun)
        if ended > deadline:
            return best


def measure_memory(nbytes: int) -> float:
    """The rate in bytes/s of reading host memory with all threads: multiplies a matrix of `nbytes` by a vector.

    `nbytes` must be larger than the caches.
    """
    import torch

    columns = 4096
    matrix = torch.ones(nbytes // (4 * columns), columns)
    vector = torch.ones(columns)
    return 4 * matrix.numel() / best_seconds(lambda: torch.mv(matrix, vector), 0.5)
