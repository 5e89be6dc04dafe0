"""Host memory that parked blocks wait in, page-locked for a device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...offload.device import Device
from ...offload.host_memory import HostMemory
from ...offload.slab import PIN_CHUNK_NBYTES, Pinned
from .spec import KVSpec


class ParkingMemory:
    """`slots[g][i]` is uint8 [block_nbytes] of layer group g.

    In pieces of whole blocks, each page-locked at once or not at all: one copy may not read from two registrations.
    What the machine does not page-lock serves too; copies then wait for the device.
    """

    def __init__(self, specs: Iterable[KVSpec], counts: Iterable[int], device: Device | None) -> None:
        self._device = device
        self._pinned: list[Pinned] = []
        self._pieces: list[HostMemory] = []
        self.slots = [
            [row for piece in self._allocate(count, spec.block_nbytes, device) for row in piece]
            for spec, count in zip(specs, counts, strict=True)
        ]

    def close(self) -> None:
        """Waits for copies that are under way; the memory is gone once nobody has a slot."""
        if self._device is not None and self._pinned:
            self._device.synchronize()
        while self._pinned:
            self._pinned.pop().close()
        self._pieces, self.slots = [], [[] for _ in self.slots]

    def _allocate(self, count: int, nbytes: int, device: Device | None) -> Iterable[torch.Tensor]:
        together = max(1, PIN_CHUNK_NBYTES // nbytes)
        for begin in range(0, count, together):
            piece = HostMemory(min(together, count - begin) * nbytes)
            self._pieces.append(piece)
            if device is not None:
                self._pin(piece, device)
            yield piece.bytes.view(-1, nbytes)

    def _pin(self, piece: HostMemory, device: Device) -> None:
        pinned = piece.pin(device)
        if list(pinned.pieces(0, piece.nbytes)) == [(0, piece.nbytes)] and pinned.nbytes == piece.nbytes:
            self._pinned.append(pinned)
        else:
            pinned.close()
