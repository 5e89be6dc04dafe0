"""Weights of a quantized checkpoint as they are: codes, scales and zero points in the planes of a weight format.

A row of all planes is one run of bytes, so that transformers' conversions, which stack, join and rename rows, treat
kept weights as they treat floats: a weight is uint8 [N, bytes of a row].
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from ...offload.checkpoint.checkpoint import Checkpoint
from ...offload.checkpoint.header import described
from ...offload.errors import BadCheckpoint
from ...quant.formats.format import ROWS, Layout, Plane, get_format
from ...quant.planes import Planes, pack_nibbles
from ...quant.tensor import dtype_name, torch_dtype
from ..shape.gguf import GgufWeight
from ..shape.quantized import QuantizedWeight
from .codes import Codes
from .dequantize import read_codes
from .gguf_weights import q4_k_rows

# Exponents of e8m0 are shifted by 127, and frexp's mantissas are below 1.
_EXPONENT = 126


def row_nbytes(layout: Layout) -> int:
    """Bytes of a row in all planes of a layout."""
    return sum(size for _, size in _row_planes(layout))


def read_rows(checkpoint: Checkpoint, weight: QuantizedWeight, experts: range | None = None) -> Tensor:
    """The rows of a weight that `weight.kept` has, uint8 [N, bytes]; [E, N, bytes] of stacked experts.

    Experts that the model has transposed are [E, bytes, N]. Raises BadCheckpoint where the bytes are not what the
    headers let expect.
    """
    if len(weight.entry.shape) == 2:
        return _matrix_rows(checkpoint, weight)
    chosen = experts or range(weight.entry.shape[0])
    rows = torch.stack([_matrix_rows(checkpoint, weight, expert) for expert in chosen])
    return rows.transpose(1, 2) if weight.turned else rows


def _matrix_rows(checkpoint: Checkpoint, weight: QuantizedWeight, expert: int | None = None) -> Tensor:
    if isinstance(weight, GgufWeight) and weight.kept == "q4_k":
        return q4_k_rows(checkpoint, weight, expert)
    return _rows(read_codes(checkpoint, weight, expert), weight)


def planes_of_rows(rows: Tensor, layout: Layout) -> Planes:
    """The planes that rows [N, bytes] are made of."""
    found, begin = [], 0
    for plane, size in _row_planes(layout):
        part = rows[:, begin : begin + size].contiguous().view(torch_dtype(plane.dtype))
        found.append(part.view(plane.shape))
        begin += size
    return Planes(*found)


def _row_planes(layout: Layout) -> Iterator[tuple[Plane, int]]:
    """The planes of a format row after row, and their bytes of one."""
    plain = get_format(layout.format).in_order(ROWS).layout(layout.shape, layout.dtype)
    for plane in plain.planes:
        yield plane, prod(plane.shape[1:]) * torch_dtype(plane.dtype).itemsize


def _rows(codes: Codes, weight: QuantizedWeight) -> Tensor:
    _check_order(codes, weight)
    numbers = codes.rows(0, codes.shape[0])
    layout = get_format(weight.kept).in_order(ROWS).layout(codes.shape, "float32")
    planes = [_codes(numbers, layout, weight)]
    for plane in layout.planes[1:]:
        grid = codes.scale if plane.name == "scales" else codes.zero
        grid = grid if isinstance(grid, Tensor) else torch.full(plane.shape, float(grid))
        planes.append(_cast(grid.reshape(plane.shape), plane, get_format(weight.kept).scales))
    return torch.cat([_as_bytes(plane.reshape(len(numbers), -1)) for plane in planes], 1)


def _as_bytes(plane: Tensor) -> Tensor:
    # A single column counts as contiguous whatever its strides are.
    return plane.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _codes(numbers: Tensor, layout: Layout, weight: QuantizedWeight) -> Tensor:
    if layout.codes != "int8":
        return pack_nibbles(numbers, high_first=layout.codes == "nf4")
    return numbers if numbers.dtype == torch.int8 else (numbers.short() - 128).to(torch.int8)


def _cast(grid: Tensor, plane: Plane, scales: str) -> Tensor:
    """A grid of float32 in the dtype that it came from. Raises BadCheckpoint where that cannot hold it."""
    if plane.name == "scales" and scales == "e8m0":
        if not grid.isfinite().all():
            raise BadCheckpoint("a scale of the checkpoint is NaN; download it again")
        return (torch.frexp(grid).exponent + _EXPONENT).to(torch.uint8)
    made = grid.to(torch_dtype(plane.dtype))
    if not torch.equal(made.float(), grid) and not grid.isnan().any():
        raise BadCheckpoint(f"{plane.name} of the checkpoint are not {dtype_name(made.dtype)}; download it again")
    return made


def _check_order(codes: Codes, weight: QuantizedWeight) -> None:
    """Codes are kept where groups are runs of columns; headers do not show it."""
    order = codes.columns
    if order is not None and not torch.equal(order, torch.arange(codes.shape[1]) // weight.group[1]):
        raise BadCheckpoint(
            f"{described(weight.tensors['order'])} orders the inputs, and config.json says nothing of desc_act; "
            "correct it there"
        )
