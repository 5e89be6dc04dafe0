"""Matrices in order `tiles` as the kernels in tiles.h have them, and such matrices widened to bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import POINTER, byref
from functools import cache

import torch
from torch import Tensor

from .interface import ENUMS, NativeMatrix, NativeTilesWidening
from .library import available, function

_CODES, _SCALES = ENUMS["codes"], ENUMS["scales"]


def native_matrix(codes: str, planes: tuple[Tensor, ...], num_columns: int) -> NativeMatrix:
    """A matrix [N, K] of such codes, of whole tiles, as the kernels take it."""
    scales, *zeros = planes[1:]
    group = num_columns // scales.shape[1] if scales.dim() > 1 else num_columns
    return NativeMatrix(
        codes=planes[0].data_ptr(),
        scales=scales.data_ptr(),
        zeros=zeros[0].data_ptr() if zeros else None,
        rows=len(planes[0]),
        columns=num_columns,
        group=group,
        codes_type=_CODES[codes],
        scales_type=_SCALES["pairs" if scales.dim() == 3 else str(scales.dtype).removeprefix("torch.")],
    )


def widen(codes: str, planes: tuple[Tensor, ...], out: Tensor) -> bool:
    """Writes the matrix of whole blocks of rows in order `tiles` into `out` [N, K], without Python's lock.

    False, with nothing written, where that cannot be: without the library, for other dtypes and devices than bfloat16
    on a CPU, for planes that are not contiguous, and for blocks that `out` has not all rows of.
    """
    if out.dtype != torch.bfloat16 or not out.is_cpu or not available() or len(out) != len(planes[0]):
        return False
    if not all(each.is_contiguous() for each in (out, *planes)):
        return False
    _function()(byref(NativeTilesWidening(native_matrix(codes, planes, out.shape[1]), out.data_ptr())))
    return True


@cache
def _function() -> Callable[..., None]:
    return function("moedge_widen_tiles", [POINTER(NativeTilesWidening)])
