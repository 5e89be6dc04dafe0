"""One allocation cut into equal slots. Knows sizes, not contents."""

from __future__ import annotations

import torch

ALIGNMENT = 4096


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """`nbytes` rounded up, so that neighbours start where direct reads and vector loads want them."""
    return -(-nbytes // alignment) * alignment


class Arena:
    """`num_slots` slots of `slot_nbytes` each, allocated once; neighbouring slots are one run of bytes."""

    def __init__(self, slot_nbytes: int, num_slots: int) -> None:
        self.slot_nbytes = slot_nbytes
        self.num_slots = num_slots
        padded = torch.empty(slot_nbytes * num_slots + ALIGNMENT, dtype=torch.uint8)
        start = -padded.data_ptr() % ALIGNMENT
        self._bytes = padded[start : start + slot_nbytes * num_slots]

    @property
    def nbytes(self) -> int:
        return self._bytes.numel()

    def slot(self, index: int) -> torch.Tensor:
        """uint8 [slot_nbytes]; writing to it writes to the arena."""
        return self._bytes[index * self.slot_nbytes : (index + 1) * self.slot_nbytes]
