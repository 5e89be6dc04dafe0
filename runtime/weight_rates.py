"""How fast this machine multiplies by weights in each format, by the number of rows at once: for its profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import cycle
from types import MappingProxyType

import torch
from torch import Tensor

from ..offload.machine.arithmetic import Case, measure_rates
from ..quant.few_rows import measure_few_rows
from ..quant.format import FORMATS
from ..quant.linear import Compute
from ..quant.scratch import scratch_nbytes
from ..quant.tensor import PackedTensor, dtype_name, pack
from ..quant.workspace import Workspace

ROWS = (1, 4, 16, 64, 256, 1024)
# Rows of activations rounded to int8, which `--compute int8` multiplies; no format of its own.
INTEGER = "int8xint8"
SHAPE = (1536, 2048)
# So many bytes of matrices take turns that none is still in a cache when it comes again, as none is in a model.
POOL_NBYTES = 192 << 20
_SECONDS = 0.06

WAYS: Mapping[str, str] = MappingProxyType({**{name: name for name in FORMATS}, INTEGER: "int8"})


@torch.inference_mode()
def weight_rates(device: str = "cpu") -> dict[str, dict[int, float]]:
    """FLOP/s of bfloat16 rows times matrices of an expert's size, all of torch's threads at work.

    By format of the weights (and "int8xint8" on a CPU), then by rows. A few seconds.
    """
    rates: dict[str, dict[int, float]] = {}
    for name, format_name in WAYS.items():
        if name != INTEGER or device == "cpu":
            case = _case(name == INTEGER, format_name, device)
            rates |= measure_rates({name: case}, ROWS, 2 * SHAPE[0] * SHAPE[1], _SECONDS)
    return rates


def _case(integer: bool, format_name: str, device: str) -> Case:
    matrices = cycle(_matrices(format_name, device))
    first = next(matrices)
    nbytes = scratch_nbytes(first.layout, dtype_name(torch.bfloat16), deterministic=False)
    few_rows = measure_few_rows(format_name) if device == "cpu" else {}
    compute = Compute(Workspace(nbytes, device), integer=integer, few_rows=few_rows)

    def case(num_rows: int) -> Callable[[], None]:
        x = torch.randn(num_rows, SHAPE[1], device=device).bfloat16()
        y = x.new_empty(num_rows, SHAPE[0])
        return partial(_multiply, compute, x, y, matrices)

    return case


def _multiply(compute: Compute, x: Tensor, y: Tensor, matrices: Iterator[PackedTensor]) -> None:
    compute.linear(x, next(matrices), out=y)
    if y.is_cuda:
        torch.cuda.synchronize()


def _matrices(format_name: str, device: str) -> list[PackedTensor]:
    packed = pack(torch.randn(SHAPE).bfloat16(), format_name)
    count = -(-POOL_NBYTES // packed.nbytes)
    return [
        PackedTensor(packed.layout, tuple(plane.to(device, copy=True) for plane in packed.planes)) for _ in range(count)
    ]
