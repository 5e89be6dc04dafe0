"""Times what it is given: arithmetic of a higher floor, and reading memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

# A case: for a number of rows, one multiplication ready to be run. It returns when it is done, on a device too.
Case = Callable[[int], Callable[[], None]]


def measure_rates(
    cases: Mapping[str, Case], rows: Sequence[int], flop_per_row: int, seconds: float = 0.1
) -> dict[str, dict[int, float]]:
    """FLOP/s of each case by number of rows; `flop_per_row` is 2 x inputs x outputs of the matrix they all multiply."""
    return {
        name: {num: num * flop_per_row / best_seconds(case(num), seconds) for num in rows}
        for name, case in cases.items()
    }


def best_seconds(run: Callable[[], object], seconds: float = 0.1) -> float:
    """The fastest of the runs that fit in `seconds`, after one that does not count. The others waited for something."""
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
    """bytes/s of reading host memory with all threads: a matrix of `nbytes`, larger than caches, times a vector."""
    import torch

    columns = 4096
    matrix = torch.ones(nbytes // (4 * columns), columns)
    vector = torch.ones(columns)
    return 4 * matrix.numel() / best_seconds(lambda: torch.mv(matrix, vector), 0.5)
