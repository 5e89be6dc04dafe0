"""The bytes of the blocks of one layer group, and how to read and write them in their KV format."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...quant.formats.format import Plane
from ...quant.kv.codec import Coded, KeyTransform, decode, encode
from ...quant.kv.format import VectorFormat, VectorPlanes
from ...quant.tensor import torch_dtype
from .spec import KVSpec


class BlockMemory:
    """`bytes` uint8 [layers * num_blocks * record_nbytes]: by layer, by plane, by block.

    A plane of one layer is contiguous over all blocks, so that a batched product needs no copy. A block therefore is
    one run of bytes per layer and plane; `get` and `put` join these for copies to and from host memory.
    """

    def __init__(self, planes: Iterable[Plane], layers: int, num_blocks: int, memory: torch.Tensor) -> None:
        """`memory` uint8 [layers * num_blocks * record_nbytes]; an unwritten slot in it must not be NaN: it is
        multiplied with probability 0."""
        self.bytes = memory
        self._by_layer = self.bytes.view(layers, -1)
        self._num_blocks = num_blocks
        self._parts = [self._part(plane) for plane in planes]

    def __len__(self) -> int:
        return self._num_blocks

    def plane(self, layer: int, plane: Plane) -> torch.Tensor:
        """A contiguous view [num_blocks, *plane.shape] of one layer."""
        part = self._part(plane)[layer].flatten()
        if not plane.nbytes:
            # The values of a group that has none: a view of nothing may begin anywhere.
            return torch.empty(self._num_blocks, *plane.shape, dtype=torch_dtype(plane.dtype), device=part.device)
        return part.view(torch_dtype(plane.dtype)).view(self._num_blocks, *plane.shape)

    def get(self, block_id: int) -> torch.Tensor:
        """A copy of a block in all layers as one run of bytes, which `put` accepts."""
        return torch.cat([part[:, block_id].flatten() for part in self._parts])

    def put(self, block_id: int, content: torch.Tensor) -> None:
        """Fills a block with what `get` returned; `content` may be longer, as slots of host memory are."""
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
        """[layers, num_blocks, plane.nbytes]. It begins at a multiple of 64, because planes do so in a record."""
        begin = plane.offset * self._num_blocks
        part = self._by_layer[:, begin : begin + plane.nbytes * self._num_blocks]
        return part.view(len(part), self._num_blocks, plane.nbytes)


# Blocks that are decoded at a time: this bounds the float32 copies.
GATHER_BLOCKS = 32


class KVPool:
    """The blocks of one layer group, laid out in `memory` as `spec.layout` says; H KV heads of D elements, T tokens.

    `key_transform` is applied to keys before they are quantized; it is None where keys are not quantized.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        device: torch.device | str = "cpu",
        key_offsets: torch.Tensor | None = None,
        tiled: bool = False,
        memory: BlockMemory | None = None,
    ) -> None:
        """`key_offsets` [layers, H, D] and `tiled` are for quantized keys (`KeyTransform`); None subtracts nothing.
        `memory` are the blocks if they are not to be allocated."""
        self.spec = spec
        layout, group = spec.layout, spec.group
        # Of keys and of values.
        self.formats = (layout.format.keys, layout.format.values)
        self.memory = memory or allocate_blocks(spec, num_blocks, device)
        self._views = [self._views_of(self.memory, layer) for layer in range(len(group.layers))]
        self.key_transform: KeyTransform | None = None
        if layout.format.keys.quantized:
            if key_offsets is None:
                key_offsets = torch.zeros(len(group.layers), group.kv_heads, group.head_dim)
            self.key_transform = KeyTransform(key_offsets.to(device), tiled)

    def _views_of(self, memory: BlockMemory, layer: int) -> tuple[Coded, Coded]:
        layout = self.spec.layout
        return _views(memory, layer, layout.keys), _views(memory, layer, layout.values)

    @property
    def nbytes(self) -> int:
        return self.memory.bytes.numel()

    @property
    def quantized(self) -> bool:
        return any(vectors.quantized for vectors in self.formats)

    def planes(self, layer: int) -> tuple[Coded, Coded]:
        """Keys and values of the group's `layer`-th layer, as contiguous views of `memory`.

        Their codes are [num_blocks, H, block, D/packed], scales and zeros [num_blocks, H, groups, block] or None.
        """
        keys, values = self._views[layer]
        return keys, values

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """q [T, Hq, D] in the basis of the stored keys: float32 for quantized keys, else q itself."""
        return q if self.key_transform is None else self.key_transform.queries(q)

    def restored(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Stored keys [T, H, D], or averages of them, in the basis that they were given in."""
        return x if self.key_transform is None else self.key_transform.restore(layer, x)

    def as_stored(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [T, H, D] as the cache returns them: attention over a prompt's own tokens uses these."""
        transformed = k if self.key_transform is None else self.key_transform.keys(layer, k)
        keys, values = self.formats
        return decode(encode(transformed, keys), keys, k.dtype), decode(encode(v, values), values, v.dtype)

    def write(
        self, layer: int, block_ids: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Stores k, v [T, H, D] of the group's `layer`-th layer at token `offsets` [T] of `block_ids` [T]."""
        transformed = k if self.key_transform is None else self.key_transform.keys(layer, k)
        for x, vectors, views in zip((transformed, v), self.formats, self._views[layer], strict=True):
            coded = encode(x, vectors)
            views.codes[block_ids, :, offsets] = coded.codes
            for view, values in ((views.scales, coded.scales), (views.zeros, coded.zeros)):
                if view is not None and values is not None:
                    view[block_ids, :, :, offsets] = values

    def tokens(
        self, layer: int, block_ids: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Keys and values [T, H, D] of single tokens at `offsets` [T] of blocks `block_ids` [T], as they are stored."""
        found = []
        for vectors, (codes, *others) in zip(self.formats, self._views[layer], strict=True):
            taken = (None if view is None else view[block_ids, :, :, offsets] for view in others)
            found.append(decode(Coded(codes[block_ids, :, offsets], *taken), vectors, dtype))
        return found

    def gather(self, layer: int, block_ids: torch.Tensor, out: Iterable[torch.Tensor]) -> None:
        """Fills out, two times [H, len(block_ids) * block, D], with the keys and values of whole blocks."""
        for side, vectors, views in zip(out, self.formats, self._views[layer], strict=True):
            if side.numel():
                target = side.view(side.shape[0], len(block_ids), -1, side.shape[-1])
                _gather(views, vectors, block_ids, target)


class LayerWindow(KVPool):
    """A pool of which one layer at a time is there, in memory that `bind` gives: on a device, the window through which
    it reads blocks that lie in host memory."""

    def __init__(self, pool: KVPool, memory: torch.Tensor) -> None:
        """Keys are transformed as those of `pool`. `memory` uint8 [num_blocks * record_nbytes] is bound first."""
        self.spec, self.formats, self.key_transform = pool.spec, pool.formats, pool.key_transform
        self._bound: dict[tuple[int, int], tuple[BlockMemory, tuple[Coded, Coded]]] = {}
        self.memory, views = self._window(memory)
        self._views = [views] * len(self.spec.group.layers)

    def bind(self, memory: torch.Tensor) -> None:
        """Lets every layer be the one whose blocks `memory` has, uint8 [num_blocks * record_nbytes]."""
        self.memory, views = self._window(memory)
        self._views = [views] * len(self.spec.group.layers)

    def _window(self, memory: torch.Tensor) -> tuple[BlockMemory, tuple[Coded, Coded]]:
        key = (memory.data_ptr(), memory.numel())
        if key not in self._bound:
            blocks = blocks_in(self.spec, memory)
            self._bound[key] = blocks, self._views_of(blocks, 0)
        return self._bound[key]


def planes_of(spec: KVSpec) -> list[Plane]:
    """The planes of a record, keys first."""
    return [plane for side in (spec.layout.keys, spec.layout.values) for plane in side if plane is not None]


def allocate_blocks(spec: KVSpec, num_blocks: int, device: torch.device | str) -> BlockMemory:
    """New blocks of all layers of a group, filled with zeros."""
    nbytes = num_blocks * spec.block_nbytes
    memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    return BlockMemory(planes_of(spec), len(spec.group.layers), num_blocks, memory)


def blocks_in(spec: KVSpec, memory: torch.Tensor) -> BlockMemory:
    """The blocks of one layer that `memory` has, uint8 [num_blocks * record_nbytes]."""
    return BlockMemory(planes_of(spec), 1, memory.numel() // spec.record_nbytes, memory)


def take_blocks(plane: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fills out [H, B, ...] with blocks of a plane [num_blocks, H, ...]; each block's head is contiguous in both.

    It copies head by head, because torch then copies whole runs; all heads at once take 30 to 100 times as long.
    """
    for head in range(plane.shape[1]):
        torch.index_select(plane[:, head], 0, block_ids, out=out[head])
    return out


def _gather(views: Coded, vectors: VectorFormat, block_ids: torch.Tensor, target: torch.Tensor) -> None:
    """Fills target [H, B, block, D] with decoded blocks."""
    if not vectors.quantized and target.dtype == views.codes.dtype:
        take_blocks(views.codes, block_ids, target)
        return
    for start in range(0, len(block_ids), GATHER_BLOCKS):
        run = block_ids[start : start + GATHER_BLOCKS]
        codes, scales, zeros = (
            None if plane is None else take_blocks(plane, run, _empty_blocks(plane, len(run))) for plane in views
        )
        assert codes is not None
        per_token = (None if plane is None else plane.transpose(2, 3) for plane in (scales, zeros))
        decoded = decode(Coded(codes, *per_token), vectors, target.dtype)
        target[:, start : start + GATHER_BLOCKS].copy_(decoded)


def _empty_blocks(plane: torch.Tensor, num_blocks: int) -> torch.Tensor:
    _, heads, *rest = plane.shape
    return plane.new_empty(heads, num_blocks, *rest)


def _views(memory: BlockMemory, layer: int, side: VectorPlanes) -> Coded:
    codes, *others = side
    return Coded(
        memory.plane(layer, codes), *(None if plane is None else memory.plane(layer, plane) for plane in others)
    )
