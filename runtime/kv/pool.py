"""The bytes of the blocks of one layer group, and what they mean in the format that they are kept in."""

from __future__ import annotations

import torch

from ...quant.format import Plane
from ...quant.kv_codec import Coded, decode, encode
from ...quant.kv_format import VectorFormat, VectorPlanes
from ...quant.tensor import torch_dtype
from .spec import KVSpec


class KVPool:
    """`records` uint8 [num_blocks, layers, record_nbytes]; H KV heads of D elements, T tokens.

    All layers of a block are adjacent, so that one copy moves it. A block's record of a layer is what
    `spec.layout` says.
    """

    def __init__(self, spec: KVSpec, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        layout = spec.layout
        self._formats = (layout.format.keys, layout.format.values)
        # Zeroed, not empty: an unwritten slot is multiplied with probability 0, and 0 * NaN is NaN.
        self.records = torch.zeros(num_blocks, len(spec.group.layers), layout.nbytes, dtype=torch.uint8, device=device)
        sides = (layout.keys, layout.values)
        self._views = [tuple(_views(self.records[:, layer], side) for side in sides) for layer in self._layers]

    @property
    def _layers(self) -> range:
        return range(len(self.spec.group.layers))

    @property
    def nbytes(self) -> int:
        return self.records.numel()

    def planes(self, layer: int) -> tuple[Coded, Coded]:
        """Keys and values of the group's `layer`-th layer: codes [num_blocks, H, block, D/packed], scales and zeros
        [num_blocks, H, groups, block] or None; views of `records`.
        """
        keys, values = self._views[layer]
        return keys, values

    def as_stored(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [T, H, D] as the cache will return them: attention over a prompt's own tokens uses these."""
        k, v = (decode(encode(x, vectors), vectors, x.dtype) for x, vectors in zip((k, v), self._formats, strict=True))
        return k, v

    def write(
        self, layer: int, block_ids: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Stores k, v [T, H, D] of the group's `layer`-th layer at token `offsets` [T] of `block_ids` [T]."""
        for x, vectors, views in zip((k, v), self._formats, self._views[layer], strict=True):
            coded = encode(x, vectors)
            views.codes[block_ids, :, offsets] = coded.codes
            for view, values in ((views.scales, coded.scales), (views.zeros, coded.zeros)):
                if view is not None and values is not None:
                    view[block_ids, :, :, offsets] = values

    def gather(self, layer: int, block_ids: torch.Tensor, out: torch.Tensor) -> None:
        """Fills out [2, H, len(block_ids) * block, D] with the keys and values of whole blocks."""
        for side, vectors, views in zip(out, self._formats, self._views[layer], strict=True):
            target = side.view(side.shape[0], len(block_ids), -1, side.shape[-1])
            _gather(views, vectors, block_ids, target)


def _gather(views: Coded, vectors: VectorFormat, block_ids: torch.Tensor, target: torch.Tensor) -> None:
    """target [H, B, block, D]."""
    codes = views.codes.transpose(0, 1)
    if not vectors.quantized and target.dtype == codes.dtype:
        # One copy straight into head-major order, 20 to 100 times faster than indexing and permuting.
        torch.index_select(codes, 1, block_ids, out=target)
        return
    scales, zeros = (
        None if view is None else view[block_ids].permute(1, 0, 3, 2) for view in (views.scales, views.zeros)
    )
    target.copy_(decode(Coded(codes.index_select(1, block_ids), scales, zeros), vectors, target.dtype))


def _views(records: torch.Tensor, side: VectorPlanes) -> Coded:
    scales, zeros = (None if plane is None else _view(records, plane) for plane in (side.scales, side.zeros))
    return Coded(_view(records, side.codes), scales, zeros)


def _view(records: torch.Tensor, plane: Plane) -> torch.Tensor:
    """A plane of records uint8 [num_blocks, nbytes] as [num_blocks, *plane.shape]; its bytes are adjacent per block."""
    part = records[:, plane.offset : plane.offset + plane.nbytes]
    return part.view(torch_dtype(plane.dtype)).view(len(records), *plane.shape)
