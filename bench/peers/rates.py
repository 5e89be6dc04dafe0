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
    """Bytes per second of reading memory, and operations per second of products, each with all threads."""

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
    """Operations per second of torch.mm with all threads, best of five.

    In bfloat16 where oneDNN has kernels for it. Elsewhere, as with AVX2 alone, torch multiplies it a hundred times
    slower, and whoever computes there computes in float32.
    """
    import torch

    dtype = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    a = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE).to(dtype)
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
