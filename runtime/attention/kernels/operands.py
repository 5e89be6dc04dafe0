"""What attention kernels are given, grouped so that a launch reads like a sentence. Free of Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Heads(NamedTuple):
    """Rows of a pass, [T, H, D] of any strides but 1 between a head's elements."""

    data: torch.Tensor
    token_stride: int
    head_stride: int

    @classmethod
    def of(cls, x: torch.Tensor) -> Heads:
        x = x if x.stride(-1) == 1 else x.contiguous()
        return cls(x, x.stride(0), x.stride(1))


class Side(NamedTuple):
    """Keys or values of one layer in all blocks; strides are elements from block to block.

    codes [blocks, H, N, C], scales and zeros [blocks, H, G, N]; what a format does not have is None. Kernels tell
    formats by that: no scales is native, no zeros is int8, both is int4.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    code_stride: int
    scale_stride: int

    @classmethod
    def of(cls, codes: torch.Tensor, scales: torch.Tensor | None, zeros: torch.Tensor | None) -> Side:
        return cls(codes, scales, zeros, codes.stride(0), 0 if scales is None else scales.stride(0))

    @property
    def parts(self) -> int:
        """Runs of head elements that are multiplied on their own: an int4 byte holds one element of each half."""
        return 1 if self.zeros is None else 2


class Pages(NamedTuple):
    """Which blocks hold a sequence's tokens, and which query rows a program computes.

    table int32 [B, max blocks]; tiles int32 [n, 5]: sequence (row of the table), origin (row of the pass where the
    sequence's position 0 would be), first position of the tile, first and last + 1 position that the pass has.
    """

    table: torch.Tensor
    tiles: torch.Tensor
    table_stride: int


class Partials(NamedTuple):
    """What splits leave for the merge: float32 sums [n, Hq, splits, D], maxima and totals [n, Hq, splits, 2]."""

    sums: torch.Tensor
    stats: torch.Tensor
    heads: int


class Features(NamedTuple):
    """AttentionCall for a kernel. `shift` float32 [T, Hq] is added to a row's products with the stored keys."""

    scale: float
    window: int | None
    chunk: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    shift: torch.Tensor | None


class Geometry(NamedTuple):
    """Sizes that a kernel is compiled for.

    A program computes `rows` query rows: `heads` of the `group` query heads that share a KV head, of rows // heads
    tokens. It takes `keys` keys at a time, of pages of `block` tokens. `key_width` and `value_width` are the parts
    of a head (see Side) as powers of two. `dtype` is what products are computed in; `dot` uses tensor cores.
    """

    head_dim: int
    kv_heads: int
    group: int
    block: int
    rows: int
    heads: int
    keys: int
    splits: int
    key_width: int
    value_width: int
    dtype: Any
    dot: bool


class StoreGeometry(NamedTuple):
    """Sizes that the store kernel is compiled for: a head and its half as powers of two, tokens per program."""

    head_dim: int
    block: int
    tokens: int
    width: int
    half_width: int
