"""Up to how many rows torch's kernels on codes are faster here than widening the matrix first: measured, not assumed.

A kernel that widens codes on its way takes time for every row; widening first takes its time once, then a product that
for few rows is as good as free. Both times grow alike with the matrix, so one small matrix tells where they meet. That
depends on the processor: matrix units speed up only one of the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from ..formats import int4
from ..scratch import scratch_nbytes
from ..tensor import dtype_name, pack
from .matmul import Matmul
from .workspace import Workspace

SHAPE = (512, 1024)
# Enough that kernels are at the rate at which further rows cost.
ROWS = 16
# Kernels lose their use beyond a tile or two of matrix units on any machine; a disturbed measurement may say more.
MOST_ROWS = 64
REPEATS = 5


def measure_few_rows(format_name: str) -> dict[str, int]:
    """What Compute takes as `few_rows` for a model in this format, in about ten milliseconds of the calling thread."""
    if format_name not in {"int8", "int4"} or (format_name == "int4" and not int4.has_kernel()):
        return {}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {format_name: _meeting_point(format_name)}
    finally:
        torch.set_num_threads(num_threads)


@torch.inference_mode()
def _meeting_point(format_name: str) -> int:
    packed = pack(torch.randn(SHAPE, dtype=torch.bfloat16), format_name)
    x = torch.randn(ROWS, SHAPE[1], dtype=torch.bfloat16)
    workspace = Workspace(scratch_nbytes(packed.layout, dtype_name(x.dtype), deterministic=False))
    kernel = Matmul(workspace, few_rows={format_name: ROWS})
    widening = Matmul(workspace, few_rows={})
    seconds = [_best_seconds(partial(compute.linear, x, packed)) for compute in (kernel, widening)]
    return max(1, min(MOST_ROWS, int(ROWS * seconds[1] / seconds[0])))


def _best_seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times)
