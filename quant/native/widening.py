"""Widens MXFP4 by the library of CPU kernels to the numbers of `formats/mxfp4.py`: one call instead of several passes.

On a processor without AVX2, and with MOEDGE_ISA=none, the library's code for such processors does it.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import POINTER, byref
from functools import cache

import torch
from torch import Tensor

from .interface import NativeWidening
from .library import portable, refused


def widen_mxfp4(codes: Tensor, scales: Tensor, out: Tensor) -> bool:
    """Writes the matrix of codes uint8 [n, K/2] and scales uint8 [n, K/32] into `out` [n, K]; without Python's lock.

    Rows may lie apart, as those of a slice of columns do. False, with nothing written, where that cannot be: without
    the library, for other dtypes and devices than bfloat16 on a CPU, and where numbers of a row are not adjacent.
    """
    if out.dtype != torch.bfloat16 or not out.is_cpu or not out.is_contiguous():
        return False
    widen = _function()
    if widen is None or refused() or codes.stride(1) != 1 or scales.stride(1) != 1:
        return False
    planes = (codes.data_ptr(), codes.stride(0), scales.data_ptr(), scales.stride(0))
    widen(byref(NativeWidening(*planes, out.data_ptr(), *out.shape)))
    return True


@cache
def _function() -> Callable[..., None] | None:
    return portable("moedge_widen", [POINTER(NativeWidening)])
