"""The smallest kernel of ours: whether Triton's compiler and its driver work on this machine. Imports Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_COUNT = 256


@triton.jit
def _double(source, target, count: tl.constexpr):
    places = tl.arange(0, count)
    tl.store(target + places, 2 * tl.load(source + places))


def try_kernel(device: torch.device | str = "cuda") -> bool:
    """Compiles it for the device and runs it; whether its numbers are right. Raises what Triton raises."""
    source = torch.arange(_COUNT, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    kernel: Any = _double
    kernel[(1,)](source, target, _COUNT)
    return torch.equal(target, 2 * source)
