"""Host memory as a tensor: of exact size, in huge pages, page-locked where a device copies from it.

Knows bytes, not what they are for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .device import Device
from .page_locked import Pinned, address_of, allocate


class HostMemory:
    """`bytes` is uint8 [nbytes]."""

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
        at `cuts`; to be closed before the memory goes."""
        address = address_of(self._memory)
        return Pinned(device.runtime, address, self.nbytes, device.clear_error, device.pins, cuts)
