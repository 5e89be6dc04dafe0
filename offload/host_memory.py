"""Host memory of exact size as a tensor, in huge pages; it can be page-locked for copies to a device.

Knows bytes, not what they are for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .device import Device
from .page_locked import Pinned, address_of, allocate


class HostMemory:
    """A block of host memory; `bytes` is its tensor, uint8 [nbytes]."""

    def __init__(self, nbytes: int) -> None:
        self._memory = allocate(max(1, nbytes))
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)[:nbytes]

    @property
    def nbytes(self) -> int:
        return self.bytes.numel()

    @property
    def view(self) -> memoryview:
        view: memoryview = self.bytes.numpy().data
        return view

    def pin(self, device: Device, cuts: Sequence[int] = ()) -> Pinned:
        """Page-locks as much of the beginning as the machine and the device's budget allow, in registrations that end
        at `cuts` (byte offsets). Close the result before this memory is freed."""
        address = address_of(self._memory)
        return Pinned(device.runtime, address, self.nbytes, device.clear_error, device.pins, cuts)
