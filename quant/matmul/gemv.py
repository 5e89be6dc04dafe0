"""Measures up to how many rows torch's GEMV kernels on codes are faster than dequantizing the matrix first.

A kernel that dequantizes codes on the fly takes time for every row. Dequantizing first takes its time once, and the
product after it is almost free for few rows. Both times are proportional to the size of the matrix, so a small matrix
shows where they are equal. That depends on the processor: matrix units speed up only one of the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from ..formats import int4
from ..formats.format import get_format
from ..scratch import scratch_nbytes
from ..tensor import dtype_name, pack
from .matmul import Matmul, Workspace

SHAPE = (512, 1024)
# Enough rows for the time per row to be constant.
ROWS = 16
# Beyond a tile or two of matrix units the kernels are not faster on any machine; a disturbed measurement may say so.
MOST_ROWS = 64
REPEATS = 5


def measure_gemv_max_rows(format_name: str) -> dict[str, int]:
    """The `gemv_max_rows` of Matmul for a model in this format; takes about ten milliseconds on the calling thread."""
    found = get_format(format_name)
    rows = found.codes == "int8" and found.group is None
    if not rows and (found.codes != "int4" or not int4.has_kernel()):
        return {}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {found.codes: _break_even_rows(found.rates or found.name)}
    finally:
        torch.set_num_threads(num_threads)


@torch.inference_mode()
def _break_even_rows(format_name: str) -> int:
    """The number of rows for which both take the same time, from 1 to MOST_ROWS."""
    packed = pack(torch.randn(SHAPE, dtype=torch.bfloat16), format_name)
    x = torch.randn(ROWS, SHAPE[1], dtype=torch.bfloat16)
    workspace = Workspace(scratch_nbytes(packed.layout, dtype_name(x.dtype), deterministic=False))
    kernel = Matmul(workspace, gemv_max_rows={format_name: ROWS})
    dequantizing = Matmul(workspace, gemv_max_rows={})
    seconds = [_best_seconds(partial(compute.linear, x, packed)) for compute in (kernel, dequantizing)]
    return max(1, min(MOST_ROWS, int(ROWS * seconds[1] / seconds[0])))


def _best_seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times)
