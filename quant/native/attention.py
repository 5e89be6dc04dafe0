"""Calls of the kernels of attention over the paged KV cache. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import POINTER, byref, c_int64, c_void_p
from functools import cache
from typing import Any

from .interface import NativeAttention
from .library import function

Kernel = Callable[[NativeAttention, int, int, int], None]


@cache
def kernels() -> tuple[Kernel, Kernel]:
    """`moedge_attend` and `moedge_attend_reduce`, called with (arguments, first item, last item + 1, scratch)."""
    return _kernel("moedge_attend"), _kernel("moedge_attend_reduce")


@cache
def _scratch() -> Callable[..., Any]:
    return function("moedge_attention_scratch", [POINTER(NativeAttention)], c_int64)


def scratch_nbytes(arguments: NativeAttention) -> int:
    """Bytes of scratch that one thread needs, from a multiple of 64 on."""
    return int(_scratch()(byref(arguments)))


def _kernel(name: str) -> Kernel:
    call = function(name, [POINTER(NativeAttention), c_int64, c_int64, c_void_p])

    def run(arguments: NativeAttention, begin: int, end: int, scratch: int) -> None:
        call(byref(arguments), begin, end, scratch)

    return run
