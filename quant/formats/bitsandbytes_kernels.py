"""The only file that imports bitsandbytes: lazily, and without letting it download a kernel from a hub.

Knows pointers and calls, not formats.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_longlong, c_void_p, cast
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

from .format import OPTION_DTYPES

CPU_NAMES = {getattr(torch, each.name): each.option for each in OPTION_DTYPES.values()}


def dequantize_nf4(codes: Tensor, absmax: Tensor, block: int, out: Tensor) -> None:
    """Writes the matrix of `codes` uint8 [N, K/2] and `absmax` float32 [N, K/block] into `out` [N, K].

    All are contiguous; the kernel gets only their addresses and cannot check that.
    """
    num_rows, num_columns = out.shape
    if codes.is_cpu and out.is_cpu:
        # The operator has no `out` on a CPU. Above malloc's threshold of 32 MiB, the result that it allocates is mapped
        # and page-faulted every time, which is 6 to 10 times slower for 4096 x 4096.
        _cpu_kernel(out.dtype)(
            c_void_p(codes.data_ptr()),
            c_void_p(absmax.data_ptr()),
            c_void_p(out.data_ptr()),
            c_longlong(block),
            c_longlong(num_rows),
            c_longlong(num_columns),
        )
    else:
        torch.ops.bitsandbytes.dequantize_4bit.out(codes, absmax, block, "nf4", out.shape, out.dtype, out=out)


def multiply_nf4(x: Tensor, codes: Tensor, absmax: Tensor, block: int, out: Tensor) -> None:
    """Writes x [T, K] times a matrix [N, K] transposed into `out` [T, N], both bfloat16 on a CPU with adjacent columns.

    `codes` are in order `nf4pack` and `absmax` is bfloat16 [K/block, N], both contiguous; N is a multiple of 32. The
    kernel gets only addresses and cannot check that. It reads columns of x in pairs, so rows must be an even number
    of columns apart. It computes on torch's number of threads.
    """
    sizes = (x.shape[0], out.shape[1], x.shape[1])
    pointers = (x.data_ptr(), codes.data_ptr(), absmax.data_ptr(), out.data_ptr())
    _fused_kernel()(*sizes, *pointers, block, x.stride(0), out.stride(0))


@cache
def has_fused() -> bool:
    """Whether `multiply_nf4` can be used here: bitsandbytes has it for x86 with AVX512-BF16."""
    load()
    library = import_module("bitsandbytes.cextension").lib
    try:
        return bool(library.has_avx512bf16_cpu()) and bool(_fused_kernel())
    except (AttributeError, OSError, RuntimeError):
        # The library was built without the kernel, or not loaded at all.
        return False


@cache
def _fused_kernel() -> Callable[..., None]:
    """The C function, which the operator of bitsandbytes calls only for one row."""
    load()
    kernel = import_module("bitsandbytes.cextension").lib.gemv_4bit_inference_cpu_nf4_bf16
    # Argument types that are known take half of the time of a call; those of bitsandbytes' own object stay as they are.
    prototype = CFUNCTYPE(None, *[c_longlong] * 3, *[c_void_p] * 4, *[c_longlong] * 3)
    return prototype(cast(kernel, c_void_p).value or 0)


@cache
def serves(device_type: str) -> bool:
    """Whether the kernels run on this device type: always on a CPU, on a GPU if the library was built for it."""
    load()
    return device_type == "cpu" or bool(import_module("bitsandbytes.cextension").lib.compiled_with_cuda)


@cache
def _cpu_kernel(dtype: torch.dtype) -> Callable[..., None]:
    """The C function that the operator calls."""
    load()
    library = import_module("bitsandbytes.cextension").lib
    kernel: Callable[..., None] = getattr(library, f"cdequantize_blockwise_cpu_nf4_{CPU_NAMES[dtype]}")
    return kernel


def load() -> None:
    """Imports bitsandbytes, which registers its operators in torch.ops."""
    if "bitsandbytes" not in sys.modules:
        with no_hub():
            import_module("bitsandbytes")


@contextmanager
def no_hub() -> Iterator[None]:
    """While entered, `import kernels` fails as if it were not installed, and bitsandbytes does not warn about it.

    The CPU backend of bitsandbytes calls kernels.get_kernel on import, which downloads code and runs it.
    """
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    was_disabled, logger.disabled = logger.disabled, True
    absent = object()
    kernels = sys.modules.get("kernels", absent)
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        logger.disabled = was_disabled
        del sys.modules["kernels"]
        if kernels is not absent:
            sys.modules["kernels"] = kernels  # type: ignore[assignment]
