"""Gets rid of a CUDA error that was already dealt with."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_spare: list[torch.Tensor] = []


def prepare_to_swallow() -> None:
    """Allocates what `swallow_cuda_error` writes to, while there is memory."""
    import torch

    if not _spare:
        _spare.append(torch.empty(1, device="cuda"))


def swallow_cuda_error() -> None:
    """Launches a kernel that takes the blame for an earlier refusal, such as that of cudaHostRegister.

    The runtime keeps the error until the next launch asks for it, and torch does not expose cudaGetLastError. The
    kernel allocates nothing: an allocator that refuses would do so before the launch, and the error would stay.
    """
    with suppress(RuntimeError):
        prepare_to_swallow()
        _spare[0].fill_(1)
