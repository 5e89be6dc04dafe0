"""Matrices in order `tiles` as the kernels in tiles.h have them, and such matrices widened to bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import addressof, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from .library import available, function

# Enums of tiles.h.
_VALUES = {"int4": 0, "nf4": 1, "e2m1": 2, "int8": 3}
_SCALES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.uint8: 3}
_PAIRS = 4


def matrix_numbers(codes: str, planes: tuple[Tensor, ...], num_columns: int) -> tuple[int, ...]:
    """The numbers that describe a matrix [N, K] of such codes, of whole tiles, behind that of its bias."""
    scales, *zeros = planes[1:]
    group = num_columns // scales.shape[1] if scales.dim() > 1 else num_columns
    return (
        planes[0].data_ptr(),
        scales.data_ptr(),
        zeros[0].data_ptr() if zeros else 0,
        len(planes[0]),
        num_columns,
        group,
        _VALUES[codes],
        _PAIRS if scales.dim() == 3 else _SCALES[scales.dtype],
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
    given = (c_int64 * 10)(0, *matrix_numbers(codes, planes, out.shape[1]), out.data_ptr())
    _function()(addressof(given))
    return True


@cache
def _function() -> Callable[[int], None]:
    return function("moedge_widen_tiles", [c_void_p])
