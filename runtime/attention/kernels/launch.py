"""Turns tensors into kernel launches: grids, compile-time sizes, warps; and all launches of a job. Imports Triton."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ....quant.kernels.product import Launch, dot_type
from .operands import (
    MAX_SPLITS,
    Cut,
    Features,
    Geometry,
    Heads,
    Pages,
    Side,
    StoreGeometry,
    Target,
    decode_cut,
    extend_cut,
    has_dot,
    padded,
    stride_unit,
)
from .paged import attend_pages, merge_splits, store_tokens

# Tokens that one program of `store_tokens` encodes.
STORE_TOKENS = 16


class Cached(NamedTuple):
    """One layer's keys and values in all blocks of `block` tokens."""

    keys: Side
    values: Side
    block: int

    @property
    def kind(self) -> str:
        """The narrower of the formats of keys and values: native, int8 or int4."""
        return {16: "native", 8: "int8", 4: "int4"}[min(self.keys.bits, self.values.bits)]

    @property
    def is_mixed(self) -> bool:
        """Whether keys and values have different formats."""
        return self.keys.bits != self.values.bits

    @property
    def kv_heads(self) -> int:
        return self.keys.codes.shape[1]


def store_launch(k: torch.Tensor, v: torch.Tensor, cached: Cached, slots: torch.Tensor) -> Launch:
    """The launch that stores k, v [T, H, D] in slots int64 [T]: block id * block + offset."""
    num_tokens, kv_heads, head_dim = k.shape
    widths = (padded(head_dim), padded(-(-head_dim // 2)))
    geometry = StoreGeometry(head_dim, cached.block, STORE_TOKENS, *widths, stride_unit(head_dim))
    grid = (triton.cdiv(num_tokens, STORE_TOKENS), kv_heads)
    (k, *strides), (v, *others) = Heads.of(k), Heads.of(v)
    if strides != others:
        (k, *strides), (v, *_) = Heads.of(k.contiguous()), Heads.of(v.contiguous())
    arguments = (k, v, cached.keys, cached.values, slots, num_tokens, *strides, geometry)
    return Launch(store_tokens, grid, arguments)


def attend_launches(
    q: torch.Tensor, out: torch.Tensor, cached: Cached, pages: Pages, features: Features, cut: Cut, splits: int = 1
) -> list[Launch]:
    """The launches that compute the rows of `pages` from q into out [T, Hq, D], contiguous.

    With several `splits`, which are for tiles of one token, a second kernel merges them.
    """
    num_tiles, num_heads, head_dim = len(pages.tiles), q.shape[1], q.shape[2]
    group, wide = num_heads // cached.kv_heads, cut.dot and out.dtype == torch.float32
    geometry = Geometry(
        head_dim=head_dim,
        kv_heads=cached.kv_heads,
        group=group,
        block=cached.block,
        rows=cut.rows,
        heads=cut.heads,
        keys=cut.keys,
        parts=cut.keys if cached.kind == "native" or wide else -(-cut.keys // cached.block),
        **dict(zip(("key_width", "key_rest"), cached.keys.widths(head_dim, cut.turned), strict=True)),
        **dict(zip(("value_width", "value_rest"), cached.values.widths(head_dim, cut.turned), strict=True)),
        unit=stride_unit(head_dim),
        turned=cut.turned,
        # Eight a warp.
        partial=min(cut.keys // 2, 8 * cut.warps) if cut.turned else 1,
        dtype=dot_type(out.dtype if cut.dot else torch.float32),
        code_type=tl.float16 if cut.dot and out.dtype != torch.float32 else tl.float32,
        dot=cut.dot,
    )
    target = Target(out)
    if splits > 1:
        sums = q.new_empty(num_tiles, num_heads, splits, head_dim, dtype=torch.float32)
        target = Target(out, sums, sums.new_empty(num_tiles, num_heads, splits, 2))
    grid = (num_tiles, cached.kv_heads * triton.cdiv(group, cut.heads), splits)
    q, *strides = Heads.of(q)
    arguments = (q, target, cached.keys, cached.values, pages, features, *strides, geometry)
    launches = [Launch(attend_pages, grid, arguments, cut.warps, cut.stages)]
    if splits > 1:
        merge = (target, pages.tiles, splits, head_dim, padded(head_dim), MAX_SPLITS)
        launches.append(Launch(merge_splits, (num_tiles, num_heads), merge, 4))
    return launches


class LayerSample(NamedTuple):
    """The operands of a layer's kernels for one row: k and v [1, H, D] to store, q [1, Hq, D] in their basis.

    `dtype` is the model's, which attention returns.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cached: Cached
    features: Features
    dtype: torch.dtype


def warm_up_launches(layers: Iterable[LayerSample], capability: tuple[int, int], tiled: bool) -> list[Launch]:
    """A launch of every kernel of these layers: store, decode without and with splits, their merge, and extend.

    Where `tiled`, extend replaces decode. Triton does not specialize kernels for anything else that changes in a job:
    tokens, sequences, their lengths, the number of splits, strides. The launches store no token and read none, so that
    they may run at any time between passes.
    """
    return [launch for layer in layers for launch in _launches(layer, capability, tiled)]


def _launches(layer: LayerSample, capability: tuple[int, int], tiled: bool) -> list[Launch]:
    q, device = layer.q, layer.q.device
    group, wide = q.shape[1] // layer.cached.kv_heads, layer.dtype == torch.float32
    # A token without a slot, and a tile without a position in the pass.
    nowhere = torch.full((1,), -1, dtype=torch.int64, device=device)
    nothing = torch.zeros(1, 5, dtype=torch.int32, device=device)
    pages = Pages(nothing[:, :1], nothing)
    out = torch.empty(q.shape, dtype=layer.dtype, device=device)
    launches = [store_launch(layer.k, layer.v, layer.cached, nowhere)]
    kinds = []
    if not tiled:
        decode = decode_cut(capability, q.shape[2], group, wide, layer.cached.kind)
        kinds += [(decode, 1), (decode, 2)]
    if has_dot(capability):
        kinds.append((extend_cut(q.shape[2], group, wide, layer.cached.is_mixed), 1))
    for cut, splits in kinds:
        launches += attend_launches(q, out, layer.cached, pages, layer.features, cut, splits)
    return launches
