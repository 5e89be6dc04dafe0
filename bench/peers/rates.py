"""What this machine's memory and products give right now: the roofs of bench/compare.py and of bench/subjects.

python -m bench.peers.rates THREADS    prints them as JSON
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

READ_NUMEL = 1 << 26
PRODUCT_SIZE = 2048


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of reading memory, and operations per second of bfloat16 products, each with all threads."""

    read_bytes_s: float
    flop_s: float


def measure() -> Rates:
    return Rates(bandwidth(), product_rate())


def bandwidth() -> float:
    """Bytes per second of reading memory with all threads, best of ten."""
    import torch

    data = torch.ones(READ_NUMEL)
    return data.nbytes / _best(data.sum, 10)


def product_rate() -> float:
    """Operations per second of torch.mm in bfloat16 with all threads, best of five."""
    import torch

    a = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE).bfloat16()
    return 2 * PRODUCT_SIZE**3 / _best(lambda: torch.mm(a, a), 5)


def _best(run: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of several runs."""
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps(asdict(measure())))
