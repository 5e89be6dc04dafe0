"""Dequantizes blocks of GGUF's types by the library of CPU kernels, to the floats of the gguf package, to the bit, and
bytes by a table."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import POINTER, byref
from functools import cache

import torch
from torch import Tensor

from .interface import ENUMS, NativeBlocks
from .library import available, function

_TYPES = ENUMS["block_type"]


def dequantize_blocks(blocks: Tensor, kind: str, weights: int) -> Tensor | None:
    """The floats [n, weights] of blocks, uint8 [n, bytes], of a type such as "Q6_K"; without Python's lock.

    None where the library cannot be used or does not know the type.
    """
    if kind.lower() not in _TYPES or not available():
        return None
    out = torch.empty(len(blocks), weights)
    _function()(byref(NativeBlocks(blocks.data_ptr(), out.data_ptr(), len(blocks), _TYPES[kind.lower()], None)))
    return out


def look_up(codes: Tensor, numbers: Tensor) -> Tensor:
    """`numbers[codes]`, float32, of uint8 codes of any shape; there are at most 256 numbers."""
    if not available():
        return numbers[codes.int()]
    codes, table, out = codes.contiguous(), torch.zeros(256), torch.empty(codes.shape)
    table[: len(numbers)] = numbers
    given = NativeBlocks(codes.data_ptr(), out.data_ptr(), codes.numel(), _TYPES["byte"], table.data_ptr())
    _function()(byref(given))
    return out


@cache
def _function() -> Callable[..., None]:
    return function("moedge_dequantize", [POINTER(NativeBlocks)])
