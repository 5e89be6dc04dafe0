"""The bytes of a layer group's blocks, plane by plane, so that attention can multiply with them where they lie."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...quant.format import Plane
from ...quant.tensor import torch_dtype


class BlockMemory:
    """`bytes` uint8 [layers * num_blocks * record_nbytes]: by layer, by plane, by block.

    A plane of one layer is contiguous over all blocks: a batched product takes it as it is, without a copy. In return
    a block is one run of bytes per layer and plane; `get` and `put` make it one for the way to and from host memory.
    """

    def __init__(
        self, planes: Iterable[Plane], record_nbytes: int, layers: int, num_blocks: int, device: torch.device | str
    ) -> None:
        # Zeroed, not empty: an unwritten slot is multiplied with probability 0, and 0 * NaN is NaN.
        self.bytes = torch.zeros(layers * num_blocks * record_nbytes, dtype=torch.uint8, device=device)
        self._by_layer = self.bytes.view(layers, -1)
        self._num_blocks = num_blocks
        self._parts = [self._part(plane) for plane in planes]

    def __len__(self) -> int:
        return self._num_blocks

    def plane(self, layer: int, plane: Plane) -> torch.Tensor:
        """[num_blocks, *plane.shape] of one layer, a contiguous view."""
        part = self._part(plane)[layer].flatten()
        return part.view(torch_dtype(plane.dtype)).view(self._num_blocks, *plane.shape)

    def get(self, block_id: int) -> torch.Tensor:
        """All that a block holds in all layers, one new run of bytes; `put` takes it."""
        return torch.cat([part[:, block_id].flatten() for part in self._parts])

    def put(self, block_id: int, content: torch.Tensor) -> None:
        """`content` may be longer: a slot of host memory is."""
        content = content.to(self.bytes.device, non_blocking=True)
        begin = 0
        for part in self._parts:
            target = part[:, block_id]
            target.copy_(content[begin : begin + target.numel()].view(target.shape))
            begin += target.numel()

    def copy(self, source: int, target: int) -> None:
        for part in self._parts:
            part[:, target].copy_(part[:, source])

    def _part(self, plane: Plane) -> torch.Tensor:
        """[layers, num_blocks, plane.nbytes]. Planes begin at multiples of 64 in a record, so that this does too."""
        begin = plane.offset * self._num_blocks
        part = self._by_layer[:, begin : begin + plane.nbytes * self._num_blocks]
        return part.view(-1, self._num_blocks, plane.nbytes)
