"""The bytes of the blocks of one layer group, and what they mean in the format that they are kept in."""

from __future__ import annotations

import torch

from ...quant.format import Plane
from ...quant.key_frame import KeyFrame
from ...quant.kv_codec import Coded, decode, encode
from ...quant.kv_format import VectorFormat, VectorPlanes
from ...quant.tensor import torch_dtype
from .spec import KVSpec

# Blocks that are decoded at a time: bounds the float32 copies.
GATHER_BLOCKS = 32


class KVPool:
    """`records` uint8 [num_blocks, layers, record_nbytes]; H KV heads of D elements, T tokens.

    All layers of a block are adjacent, so that one copy moves it. A block's record of a layer is what
    `spec.layout` says. Quantized keys are kept in `frame`; it is None where keys are kept as they are.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        device: torch.device | str = "cpu",
        key_offsets: torch.Tensor | None = None,
        tiled: bool = False,
    ) -> None:
        """`key_offsets` [layers, H, D] and `tiled` are for quantized keys (`KeyFrame`); None takes nothing off."""
        self.spec = spec
        layout, group = spec.layout, spec.group
        self._formats = (layout.format.keys, layout.format.values)
        # Zeroed, not empty: an unwritten slot is multiplied with probability 0, and 0 * NaN is NaN.
        self.records = torch.zeros(num_blocks, len(group.layers), layout.nbytes, dtype=torch.uint8, device=device)
        sides = (layout.keys, layout.values)
        self._views = [
            tuple(_views(self.records[:, layer], side) for side in sides) for layer in range(len(group.layers))
        ]
        self.frame: KeyFrame | None = None
        if layout.format.keys.quantized:
            if key_offsets is None:
                key_offsets = torch.zeros(len(group.layers), group.kv_heads, group.head_dim)
            self.frame = KeyFrame(key_offsets.to(device), tiled)

    @property
    def nbytes(self) -> int:
        return self.records.numel()

    @property
    def formats(self) -> tuple[VectorFormat, VectorFormat]:
        """Of keys and values."""
        return self._formats

    @property
    def quantized(self) -> bool:
        return any(vectors.quantized for vectors in self._formats)

    def planes(self, layer: int) -> tuple[Coded, Coded]:
        """Keys and values of the group's `layer`-th layer, views of `records`.

        Codes are [num_blocks, H, block, D/packed], scales and zeros [num_blocks, H, groups, block] or None.
        """
        keys, values = self._views[layer]
        return keys, values

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """q [T, Hq, D] as it meets the keys that are stored: float32 for quantized ones, else q itself."""
        return q if self.frame is None else self.frame.queries(q)

    def as_stored(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [T, H, D] as the cache will return them: attention over a prompt's own tokens uses these."""
        framed = k if self.frame is None else self.frame.keys(layer, k)
        keys, values = self._formats
        return decode(encode(framed, keys), keys, k.dtype), decode(encode(v, values), values, v.dtype)

    def write(
        self, layer: int, block_ids: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Stores k, v [T, H, D] of the group's `layer`-th layer at token `offsets` [T] of `block_ids` [T]."""
        framed = k if self.frame is None else self.frame.keys(layer, k)
        for x, vectors, views in zip((framed, v), self._formats, self._views[layer], strict=True):
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


def take_blocks(plane: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fills out [H, B, ...] with some blocks of a plane [num_blocks, H, ...], both contiguous from there on.

    Head by head, since then torch copies whole runs; over all heads at once it takes 30 to 100 times as long.
    """
    for head in range(plane.shape[1]):
        torch.index_select(plane[:, head], 0, block_ids, out=out[head])
    return out


def _gather(views: Coded, vectors: VectorFormat, block_ids: torch.Tensor, target: torch.Tensor) -> None:
    """target [H, B, block, D]."""
    if not vectors.quantized and target.dtype == views.codes.dtype:
        take_blocks(views.codes, block_ids, target)
        return
    for start in range(0, len(block_ids), GATHER_BLOCKS):
        run = block_ids[start : start + GATHER_BLOCKS]
        codes, scales, zeros = (
            None if plane is None else take_blocks(plane, run, _room_for(plane, len(run))) for plane in views
        )
        assert codes is not None
        per_token = (None if plane is None else plane.transpose(2, 3) for plane in (scales, zeros))
        decoded = decode(Coded(codes, *per_token), vectors, target.dtype)
        target[:, start : start + GATHER_BLOCKS].copy_(decoded)


def _room_for(plane: torch.Tensor, num_blocks: int) -> torch.Tensor:
    _, heads, *rest = plane.shape
    return plane.new_empty(heads, num_blocks, *rest)


def _views(records: torch.Tensor, side: VectorPlanes) -> Coded:
    scales, zeros = (None if plane is None else _view(records, plane) for plane in (side.scales, side.zeros))
    return Coded(_view(records, side.codes), scales, zeros)


def _view(records: torch.Tensor, plane: Plane) -> torch.Tensor:
    """A plane of records uint8 [num_blocks, nbytes] as [num_blocks, *plane.shape]; its bytes are adjacent per block."""
    part = records[:, plane.offset : plane.offset + plane.nbytes]
    return part.view(torch_dtype(plane.dtype)).view(len(records), *plane.shape)
