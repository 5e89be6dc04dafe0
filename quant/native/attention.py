"""The C interface of attention over the paged KV cache: its arguments, and calls of its kernels. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from functools import cache
from types import MappingProxyType
from typing import Any

from .library import function

# Positions of a row's past that are added up before they are added to others; and rows that one call computes together.
SPLIT = 256
ROWS = 8
# `enum moedge_format`, by name in quant/kv/format.py.
FORMATS: Mapping[str, int] = MappingProxyType({"fp32": 0, "bf16": 1, "fp16": 2, "int8": 3, "int4": 4})


class Vectors(Structure):
    """`struct moedge_vectors`."""

    _fields_ = [
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("format", c_int32),
        ("width", c_int32),
    ]


class Attention(Structure):
    """`struct moedge_attention`; pointers are addresses of contiguous memory that outlives the calls."""

    _fields_ = [
        ("keys", Vectors * 2),
        ("values", Vectors),
        ("num_parts", c_int32),
        ("kv_heads", c_int32),
        ("group", c_int32),
        ("block", c_int32),
        ("window", c_int32),
        ("chunk", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("shift", c_void_p),
        ("tables", c_void_p),
        ("table_width", c_int64),
        ("rows", c_void_p),
        ("queries", c_void_p),
        ("out", c_void_p),
        ("query_format", c_int32),
        ("out_format", c_int32),
        ("exact", c_int32),
        ("rotated", c_int32),
        ("num_pieces", c_int32),
        ("pieces", c_void_p),
        ("partials", c_void_p),
        ("partial_stride", c_int64),
    ]


Kernel = Callable[[Attention, int, int, int], None]


@cache
def kernels() -> tuple[Kernel, Kernel]:
    """`moedge_attend` and `moedge_attend_reduce`, called with (arguments, first item, last item + 1, scratch)."""
    return _kernel("moedge_attend"), _kernel("moedge_attend_reduce")


@cache
def _scratch() -> Callable[..., Any]:
    return function("moedge_attention_scratch", [POINTER(Attention)], c_int64)


def scratch_nbytes(arguments: Attention) -> int:
    """Bytes of scratch that one thread needs, from a multiple of 64 on."""
    return int(_scratch()(byref(arguments)))


def _kernel(name: str) -> Kernel:
    call = function(name, [POINTER(Attention), c_int64, c_int64, c_void_p])

    def run(arguments: Attention, begin: int, end: int, scratch: int) -> None:
        call(byref(arguments), begin, end, scratch)

    return run
