"""The bytes of the blocks of one layer group, and what they mean in the format that they are kept in."""

from __future__ import annotations

import torch

from ...quant.key_frame import KeyFrame
from ...quant.kv_codec import Coded, decode, encode
from ...quant.kv_format import VectorFormat, VectorPlanes
from .block_memory import BlockMemory
from .spec import KVSpec

# Blocks that are decoded at a time: bounds the float32 copies.
GATHER_BLOCKS = 32


class KVPool:
    """`memory` holds what `spec.layout` says of every block and layer; H KV heads of D elements, T tokens.

    Quantized keys are kept in `frame`; it is None where keys are kept as they are.
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
        sides = (layout.keys, layout.values)
        planes = [plane for side in sides for plane in side if plane is not None]
        self.memory = BlockMemory(planes, layout.nbytes, len(group.layers), num_blocks, device)
        self._views = [tuple(_views(self.memory, layer, side) for side in sides) for layer in range(len(group.layers))]
        self.frame: KeyFrame | None = None
        if layout.format.keys.quantized:
            if key_offsets is None:
                key_offsets = torch.zeros(len(group.layers), group.kv_heads, group.head_dim)
            self.frame = KeyFrame(key_offsets.to(device), tiled)

    @property
    def nbytes(self) -> int:
        return self.memory.bytes.numel()

    @property
    def formats(self) -> tuple[VectorFormat, VectorFormat]:
        """Of keys and values."""
        return self._formats

    @property
    def quantized(self) -> bool:
        return any(vectors.quantized for vectors in self._formats)

    def planes(self, layer: int) -> tuple[Coded, Coded]:
        """Keys and values of the group's `layer`-th layer, views of `memory`.

        Contiguous: codes are [num_blocks, H, block, D/packed], scales and zeros [num_blocks, H, groups, block] or None.
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


def _views(memory: BlockMemory, layer: int, side: VectorPlanes) -> Coded:
    codes, *others = side
    return Coded(
        memory.plane(layer, codes), *(None if plane is None else memory.plane(layer, plane) for plane in others)
    )
