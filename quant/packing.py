"""Quantizes bfloat16 matrices by the library of CPU kernels, to the same bytes as the codecs of `formats/`.

A codec takes some twenty torch operations a chunk, between which threads wait for Python's lock; this is one call.
"""

from __future__ import annotations

from ctypes import POINTER, byref

from torch import Tensor

from .formats.format import INT4PACK, ROWS, Layout
from .native.library import ENUMS, NativePacking, available, function

_FORMATS, _ORDERS = ENUMS["weight_format"], ENUMS["order"]
# Numbers of the rows that one call packs: few enough that threads end together, many enough that the call costs little.
CHUNK = 1 << 18


def takes(weight: Tensor, layout: Layout) -> bool:
    """Whether `pack_rows` packs such a matrix: what `--quant` makes of bfloat16 weights on a CPU, in every order that
    is used where there is the library. Others, and float16 and float32 weights, are left to the codecs."""
    orders = (ROWS,) if layout.codes == "int8" else _ORDERS
    known = layout.format in _FORMATS and layout.order in orders
    return known and layout.dtype == "bfloat16" and weight.device.type == "cpu" and available()


def pack_rows(weight: Tensor, layout: Layout, planes: tuple[Tensor, ...]) -> bool:
    """Fills the planes of some rows of a matrix of this layout from `weight` [n, K]; without Python's lock.

    False, with some of the rows packed, if weights are NaN or infinite.
    """
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    codes, scales = planes
    some = NativePacking(
        x=weight.data_ptr(),
        stride=weight.stride(0),
        rows=weight.shape[0],
        columns=weight.shape[1],
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        scale_stride=scales.stride(0) // 2 if layout.order == INT4PACK else 0,
        format=_FORMATS[layout.format],
        order=_ORDERS[layout.order],
    )
    function("moedge_pack", POINTER(NativePacking))(byref(some))
    return bool(some.finite)
