"""What attention kernels are given, grouped so that a launch reads like a sentence. Free of Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Heads(NamedTuple):
    """Rows of a pass, [T, H, D] with a head's elements side by side. Strides are in units of `stride_unit(D)`.

    The strides are plain arguments of a kernel, never in a tuple with others: what lies in a tuple is part of what
    Triton compiles a kernel for, and strides change with the number of tokens.
    """

    data: torch.Tensor
    token_stride: int
    head_stride: int

    @classmethod
    def of(cls, x: torch.Tensor) -> Heads:
        unit = stride_unit(x.shape[-1])
        # The stride of an axis of one is any number.
        token, head, item = (stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True))
        if item == 1 and token % unit == head % unit == 0:
            return cls(x, token // unit, head // unit)
        x = x.contiguous()
        return cls(x, x.shape[1] * x.shape[2] // unit, x.shape[2] // unit)


def stride_unit(head_dim: int) -> int:
    """What strides of heads are multiples of, at most 16 elements: kernels know it, so that loads are wide."""
    return min(16, head_dim & -head_dim)


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
    def bits(self) -> int:
        """Of a code: 16 stands for all native ones."""
        if self.scales is None:
            return 16
        return 8 if self.zeros is None else 4

    @property
    def parts(self) -> int:
        """Runs of head elements that are multiplied on their own: an int4 byte holds one element of each half."""
        return 1 if self.zeros is None else 2


class Pages(NamedTuple):
    """Which blocks hold a sequence's tokens, and which query rows a program computes.

    table int32 [B, max blocks]; tiles int32 [n, 5]: where the sequence's row of the table begins, origin (row of the
    pass where the sequence's position 0 would be), first position of the tile, first and last + 1 position that the
    pass has.
    """

    table: torch.Tensor
    tiles: torch.Tensor


class Target(NamedTuple):
    """out [T, Hq, D], contiguous. With splits also what they leave for the merge: float32 sums [n, Hq, splits, D], and
    maxima and totals [n, Hq, splits, 2].
    """

    out: torch.Tensor
    sums: torch.Tensor | None = None
    stats: torch.Tensor | None = None


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
    of a head (see Side) as powers of two. Strides of queries are multiples of `unit`. `dtype` is what products are
    computed in; `dot` uses tensor cores.
    """

    head_dim: int
    kv_heads: int
    group: int
    block: int
    rows: int
    heads: int
    keys: int
    key_width: int
    value_width: int
    unit: int
    dtype: Any
    dot: bool


class StoreGeometry(NamedTuple):
    """Sizes that the store kernel is compiled for: a head and its half as powers of two, tokens per program, and what
    strides are multiples of.
    """

    head_dim: int
    block: int
    tokens: int
    width: int
    half_width: int
    unit: int
