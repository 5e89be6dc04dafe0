"""What CUDA's libraries take when they are first used, taken before it is counted."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..offload.device import Device
from ..offload.memory_error import is_out_of_memory

_SIZE = 64
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def load_libraries(device: Device) -> None:
    """Makes cuBLAS's handle and workspace, one product in each dtype and one attention in each.

    The driver gives all of it memory that torch's allocator knows nothing of: used for the first time in a pass, it
    would come out of what a plan has given away.
    """
    for dtype in _DTYPES:
        try:
            _multiply(device.place, dtype)
            _attend(device.place, dtype)
        except RuntimeError as error:
            # What a GPU has no kernel for fails where it is wanted, with words of its own.
            if is_out_of_memory(error):
                raise
    device.synchronize()


def _multiply(place: torch.device, dtype: torch.dtype) -> None:
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype, device=place)
    torch.mm(matrix, matrix)


def _attend(place: torch.device, dtype: torch.dtype) -> None:
    heads = torch.ones(1, 2, _SIZE, _SIZE, dtype=dtype, device=place)
    functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
