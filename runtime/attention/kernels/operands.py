"""The operands of attention kernels, grouped so that a launch has few arguments, and tile sizes. Free of Triton.

Tile sizes were chosen by what compiles without spills (docs/dev/kernels.md); only an H100 has timed them
(bench/results/gpu.md), and `python -m bench.kernels` times them on others.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch


class Heads(NamedTuple):
    """Rows of a pass, [T, H, D] with contiguous heads. Strides are in units of `stride_unit(D)`.

    The strides are plain arguments of a kernel, never members of a tuple: Triton specializes a kernel for what a tuple
    holds, and strides change with the number of tokens.
    """

    data: torch.Tensor
    token_stride: int
    head_stride: int

    @classmethod
    def of(cls, x: torch.Tensor) -> Self:
        unit = stride_unit(x.shape[-1])
        # The stride of an axis of length one is arbitrary.
        token, head, item = (stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True))
        if item == 1 and token % unit == head % unit == 0:
            return cls(x, token // unit, head // unit)
        x = x.contiguous()
        return cls(x, x.shape[1] * x.shape[2] // unit, x.shape[2] // unit)


def stride_unit(head_dim: int) -> int:
    """The largest power of two up to 16 that divides strides of heads: kernels are given it and load wide vectors."""
    return min(16, head_dim & -head_dim)


class Side(NamedTuple):
    """Keys or values of one layer in all blocks; strides are elements from block to block.

    codes [blocks, H, N, C], scales and zeros [blocks, H, G, N]; planes that a format does not have are None. Kernels
    recognise formats by them: native has no scales, int8 has no zeros, int4 has both.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    code_stride: int
    scale_stride: int

    @classmethod
    def of(cls, codes: torch.Tensor, scales: torch.Tensor | None, zeros: torch.Tensor | None) -> Self:
        return cls(codes, scales, zeros, codes.stride(0), 0 if scales is None else scales.stride(0))

    @property
    def bits(self) -> int:
        """Bits per code; 16 for every native format."""
        if self.scales is None:
            return 16
        return 8 if self.zeros is None else 4

    def widths(self, head_dim: int, divided: bool) -> tuple[int, int]:
        """The padded widths of the two parts of a head, of int4 of half of it, that are multiplied one after the other.

        The second is 0 where nothing is left. A head may be `divided` at a power of two, the first part: the second
        part of int8 is unpacked into the shared memory where the first one was, and int4 then pads less. tl.dot sums
        over at least 16 elements, and loads of int4 stay wide.
        """
        columns = head_dim // 2 if self.bits == 4 else head_dim
        first = max(16, padded(columns) // 2)
        if divided and columns > first and (self.bits == 8 or (columns % 16 == 0 and columns < 2 * first)):
            return first, max(16, padded(columns - first))
        return max(16, padded(columns)), 0


class Pages(NamedTuple):
    """The blocks that hold each sequence's tokens, and the query rows that each program computes.

    table int32 [B, max blocks]; tiles int32 [n, 5]: the beginning of the sequence's row of the table, the origin (the
    row of the pass at which the sequence's position 0 would be), the first position of the tile, and the first and
    last + 1 of the sequence's positions in the pass.
    """

    table: torch.Tensor
    tiles: torch.Tensor


class Target(NamedTuple):
    """The output [T, Hq, D], contiguous; with splits also their partial results for the merge.

    These are sums [n, Hq, splits, D], and maxima and totals in `stats` [n, Hq, splits, 2], all in float32.
    """

    out: torch.Tensor
    sums: torch.Tensor | None = None
    stats: torch.Tensor | None = None


class Features(NamedTuple):
    """An `AttentionCall` for a kernel. `shift` float32 [T, Hq] is added to a row's products with the stored keys."""

    scale: float
    window: int | None
    chunk: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    shift: torch.Tensor | None


class Geometry(NamedTuple):
    """Sizes that a kernel is compiled for.

    A program computes `rows` query rows: `heads` of the `group` query heads that share a KV head, for rows // heads
    tokens. It reads `keys` keys at a time, from blocks of `block` tokens, of which `parts` places are looked up: every
    block, or every key. Heads of keys and of values, of int4 halves of them, have a first part of `width` columns and
    what is left, padded to `rest`, 0 where nothing is (see `Side`). Strides of queries are multiples of `unit`.
    Products are computed in `dtype`, those of codes in `code_type`; `dot` uses tensor cores. Of these, rows come in 16:
    where it is `turned`, they are keys and columns of values, and queries come in 8. Sums of rows are kept in `partial`
    columns.
    """

    head_dim: int
    kv_heads: int
    group: int
    block: int
    rows: int
    heads: int
    keys: int
    parts: int
    key_width: int
    key_rest: int
    value_width: int
    value_rest: int
    unit: int
    turned: bool
    partial: int
    dtype: Any
    code_type: Any
    dot: bool


class StoreGeometry(NamedTuple):
    """Sizes that the store kernel is compiled for.

    `width` and `half_width` are a head and half of it, padded to powers of two; a program stores `tokens` tokens;
    strides are multiples of `unit`.
    """

    head_dim: int
    block: int
    tokens: int
    width: int
    half_width: int
    unit: int


class Cut(NamedTuple):
    """A program computes `rows` query rows, `heads` query heads of each token, and reads `keys` keys at a time.

    `dot` uses tensor cores, `turned` with keys in their rows: all query rows are of one token then. `warps` and
    `stages` (of software pipelining) are Triton's launch options.
    """

    rows: int
    heads: int
    keys: int
    warps: int
    stages: int
    dot: bool = True
    turned: bool = False


# (rows, keys, warps, stages) by head size, padded to a power of two; of single tokens by the narrower format of keys
# and values: codes take less shared memory, so that more keys share what a step costs. With more, an SM of 100 KiB of
# shared memory (8.6, 8.9, 12.0) would have room for fewer than 12 warps.
_DECODE = {
    "native": {64: (16, 64, 4, 2), 128: (16, 32, 4, 2), 256: (16, 32, 4, 2)},
    "int8": {64: (8, 128, 4, 2), 128: (8, 64, 4, 2), 256: (8, 32, 4, 2)},
    "int4": {64: (8, 128, 4, 2), 128: (8, 64, 4, 2), 256: (8, 32, 4, 2)},
}
_EXTEND = {64: (64, 64, 4, 2), 128: (64, 32, 4, 2), 256: (64, 32, 8, 2)}
# By head size, where keys and values differ in bits: with 64 rows, Triton 3.6 for sm90 multiplies int8 keys and int4
# values of heads of 64 wrongly and reads beyond shared memory.
_EXTEND_MIXED = {**_EXTEND, 64: (32, 64, 4, 2)}
# Tensor cores would round float32: products are multiply-adds, which only few rows keep in registers.
_WIDE = {64: (16, 32, 4, 1), 128: (16, 16, 4, 1), 256: (16, 16, 8, 1)}
# Over codes of two kinds, 4 warps spill up to 256 bytes.
_WIDE_CODES = {**_WIDE, 128: (16, 32, 8, 1)}
# Below sm80 Triton (since 3.3) turns tl.dot into multiply-adds that spill: products are written out there, and only few
# rows keep them in registers. By the narrower format of keys and values: a warp loads half as many bytes of int4. Sums
# of native ones take half as many instructions where a warp has them to itself; where up to two heads share a key they
# are few anyway, and twice as many warps have room.
_DECODE_NO_DOT = {
    "native": {64: (4, 8, 1, 1), 128: (4, 4, 1, 1), 256: (4, 4, 2, 1)},
    "native, few heads": {64: (2, 8, 2, 1), 128: (2, 8, 2, 1), 256: (2, 8, 4, 1)},
    "int8": {64: (4, 16, 4, 1), 128: (2, 16, 8, 1), 256: (4, 16, 8, 1)},
    "int4": {64: (2, 16, 2, 1), 128: (2, 16, 4, 1), 256: (4, 16, 8, 1)},
}
DOT_CAPABILITY = (8, 0)
# Partial results of one token: its merge reads them at once, and at 16 a head of 128 has 8 KiB of them in float32.
MAX_SPLITS = 16


def has_dot(capability: tuple[int, int]) -> bool:
    return capability >= DOT_CAPABILITY


def decode_cut(capability: tuple[int, int], head_dim: int, group: int, wide: bool, kind: str = "native") -> Cut:
    """The sizes for single tokens; `group` query heads share a KV head, and `wide` means a float32 model.

    `kind` is the narrower of the formats of keys and values: native, int8 or int4.
    """
    if has_dot(capability):
        sizes = _DECODE[kind] if not wide else _WIDE if kind == "native" else _WIDE_CODES
        cut = _with_dot(sizes[_size(head_dim)], group)
        return cut if wide or kind == "native" else cut._replace(heads=cut.rows, turned=True)
    sizes = _DECODE_NO_DOT["native, few heads" if kind == "native" and group <= 2 else kind]
    rows, keys, warps, stages = sizes[_size(head_dim)]
    heads = min(rows, group)
    return Cut(padded(heads), heads, keys, warps, stages, dot=False)


def extend_cut(head_dim: int, group: int, wide: bool, mixed: bool) -> Cut:
    """The sizes for runs of tokens, on GPUs with `has_dot`; `mixed` if keys and values have different formats."""
    sizes = ((_EXTEND, _EXTEND_MIXED), (_WIDE, _WIDE_CODES))[wide][mixed]
    return _with_dot(sizes[_size(head_dim)], group)


def num_splits(programs: int, processors: int, longest: int, keys: int) -> int:
    """The number of splits, a power of two.

    There are enough programs to fill the GPU twice, none with fewer than four runs of keys, or than 256 keys, and none
    with fewer than 64.
    """
    wanted = min(2 * processors // programs, longest // max(64, min(4 * keys, 256)), MAX_SPLITS)
    return padded(max(wanted, 1) + 1) // 2


def _with_dot(sizes: tuple[int, int, int, int], group: int) -> Cut:
    rows, keys, warps, stages = sizes
    return Cut(max(rows, padded(group)), group, keys, warps, stages)


def _size(head_dim: int) -> int:
    return max(64, padded(head_dim))


def padded(count: int) -> int:
    """`count` rounded up to a power of two, which Triton requires of tile sizes."""
    return 1 << (count - 1).bit_length()
