"""Calls of the library of CPU kernels on tensors: attention, GGUF's blocks, and matrices widened to bfloat16.

Widening MXFP4 is one call in place of several passes of torch. On a processor without AVX2, and with MOEDGE_ISA=none,
the library's code for such processors does it.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import POINTER, byref, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from .library import (
    ENUMS,
    NativeAttention,
    NativeBlocks,
    NativeMatrix,
    NativeTilesWidening,
    NativeWidening,
    available,
    function,
    portable,
    refused,
)

Kernel = Callable[[NativeAttention, int, int, int], None]
_CODES, _SCALES, _BLOCK_TYPES = ENUMS["codes"], ENUMS["scales"], ENUMS["block_type"]


def attention_kernels() -> tuple[Kernel, Kernel]:
    """`moedge_attend` and `moedge_attend_reduce`, called with (arguments, first item, last item + 1, scratch)."""
    return _attention_kernel("moedge_attend"), _attention_kernel("moedge_attend_reduce")


def _attention_kernel(name: str) -> Kernel:
    call = function(name, POINTER(NativeAttention), c_int64, c_int64, c_void_p)

    def run(arguments: NativeAttention, begin: int, end: int, scratch: int) -> None:
        call(byref(arguments), begin, end, scratch)

    return run


def attention_scratch_nbytes(arguments: NativeAttention) -> int:
    """Bytes of scratch that one thread needs, from a multiple of 64 on."""
    return int(function("moedge_attention_scratch", POINTER(NativeAttention), result=c_int64)(byref(arguments)))


def dequantize_blocks(blocks: Tensor, kind: str, weights: int) -> Tensor | None:
    """The floats [n, weights] of blocks, uint8 [n, bytes], of a type of GGUF such as "Q6_K"; without Python's lock.

    To the bit those of the gguf package. None where the library cannot be used or does not know the type.
    """
    if kind.lower() not in _BLOCK_TYPES or not available():
        return None
    out = torch.empty(len(blocks), weights)
    arguments = NativeBlocks(blocks.data_ptr(), out.data_ptr(), len(blocks), _BLOCK_TYPES[kind.lower()], None)
    function("moedge_dequantize", POINTER(NativeBlocks))(byref(arguments))
    return out


def argmax(logits: Tensor) -> Tensor | None:
    """The first largest number of each row of logits [B, V], int64; -1 where one is NaN or the largest is infinite.

    None where the library cannot be used, or the logits are not bfloat16 in host memory with adjacent columns.
    """
    taken = logits.dtype == torch.bfloat16 and logits.device.type == "cpu" and logits.stride(1) == 1
    if not taken or not available():
        return None
    ids = torch.empty(len(logits), dtype=torch.int64)
    call = function("moedge_argmax", c_void_p, c_int64, c_int64, c_int64, c_void_p)
    call(logits.data_ptr(), logits.stride(0), *logits.shape, ids.data_ptr())
    return ids


def look_up(codes: Tensor, numbers: Tensor) -> Tensor:
    """`numbers[codes]`, float32, of uint8 codes of any shape; there are at most 256 numbers."""
    if not available():
        return numbers[codes.int()]
    codes, table, out = codes.contiguous(), torch.zeros(256), torch.empty(codes.shape)
    table[: len(numbers)] = numbers
    byte = _BLOCK_TYPES["byte"]
    arguments = NativeBlocks(codes.data_ptr(), out.data_ptr(), codes.numel(), byte, table.data_ptr())
    function("moedge_dequantize", POINTER(NativeBlocks))(byref(arguments))
    return out


def native_matrix(codes: str, planes: tuple[Tensor, ...], num_columns: int) -> NativeMatrix:
    """A matrix [N, K] of such codes, or bfloat16 for "none", of whole tiles, as the kernels in tiles.h take it."""
    if codes == "none":
        (floats,) = planes
        sizes = {"rows": len(floats), "columns": num_columns, "group": num_columns}
        return NativeMatrix(codes=floats.data_ptr(), codes_type=_CODES["bf16"], **sizes)
    scales, *others = planes[1:]
    group = num_columns // scales.shape[1] if scales.dim() > 1 else num_columns
    return NativeMatrix(
        codes=planes[0].data_ptr(),
        scales=scales.data_ptr(),
        zeros=next((each.data_ptr() for each in others if each.dim() > 1), None),
        factors=next((each.data_ptr() for each in others if each.dim() == 1), None),
        rows=len(planes[0]),
        columns=num_columns,
        group=group,
        codes_type=_CODES[codes],
        scales_type=_SCALES["pairs" if scales.dim() == 3 else str(scales.dtype).removeprefix("torch.")],
    )


def widen_tiles(codes: str, planes: tuple[Tensor, ...], out: Tensor) -> bool:
    """Writes the matrix of whole blocks of rows in order `tiles` into `out` [N, K], without Python's lock.

    False, with nothing written, where that cannot be: without the library, for other dtypes and devices than bfloat16
    on a CPU, for planes that are not contiguous, and for blocks that `out` has not all rows of.
    """
    if out.dtype != torch.bfloat16 or not out.is_cpu or not available() or len(out) != len(planes[0]):
        return False
    if not all(each.is_contiguous() for each in (out, *planes)):
        return False
    arguments = NativeTilesWidening(native_matrix(codes, planes, out.shape[1]), out.data_ptr())
    function("moedge_widen_tiles", POINTER(NativeTilesWidening))(byref(arguments))
    return True


def widen_mxfp4(codes: Tensor, scales: Tensor, out: Tensor) -> bool:
    """Writes the matrix of codes uint8 [n, K/2] and scales uint8 [n, K/32] into `out` [n, K]; without Python's lock.

    Rows may lie apart, as those of a slice of columns do. False, with nothing written, where that cannot be: without
    the library, for other dtypes and devices than bfloat16 on a CPU, and where numbers of a row are not adjacent.
    """
    if out.dtype != torch.bfloat16 or not out.is_cpu or not out.is_contiguous():
        return False
    widen = _mxfp4_widener()
    if widen is None or refused() or codes.stride(1) != 1 or scales.stride(1) != 1:
        return False
    planes = (codes.data_ptr(), codes.stride(0), scales.data_ptr(), scales.stride(0))
    widen(byref(NativeWidening(*planes, out.data_ptr(), *out.shape)))
    return True


@cache
def _mxfp4_widener() -> Callable[..., None] | None:
    return portable("moedge_widen", POINTER(NativeWidening))
