"""Tile sizes of the attention kernels, by GPU and head size. They are constants: nothing is tuned when a job starts.

Chosen by what compiles without spills (docs/dev/kernels.md); only an H100 has timed them (bench/results/gpu.md), and
`python -m bench.kernels` times them on others. Free of Triton.
"""

from __future__ import annotations

from typing import NamedTuple


class Cut(NamedTuple):
    """A program computes `rows` query rows, `heads` query heads of each token, and reads `keys` keys at a time.

    `dot` uses tensor cores; `warps` and `stages` (of software pipelining) are Triton's launch options.
    """

    rows: int
    heads: int
    keys: int
    warps: int
    stages: int
    dot: bool = True


# (rows, keys, warps, stages) by head size, padded to a power of two.
_DECODE = {64: (16, 64, 4, 2), 128: (16, 32, 4, 2), 256: (16, 32, 4, 2)}
_EXTEND = {64: (64, 64, 4, 2), 128: (64, 32, 4, 2), 256: (64, 32, 8, 2)}
# By head size, where keys and values differ in bits: with 64 rows, Triton 3.6 for sm90 multiplies int8 keys and int4
# values of heads of 64 wrongly and reads beyond shared memory.
_EXTEND_MIXED = {**_EXTEND, 64: (32, 64, 4, 2)}
# Tensor cores would round float32: products are multiply-adds, which only few rows keep in registers.
_WIDE = {64: (16, 32, 4, 1), 128: (16, 32, 4, 1), 256: (16, 16, 8, 1)}
# Below sm80 Triton (since 3.3) turns tl.dot into multiply-adds that spill: products are written out there, and only few
# rows keep them in registers. By the narrower format of keys and values: a warp loads half as many bytes of int4.
_DECODE_NO_DOT = {
    "native": {64: (4, 16, 4, 1), 128: (4, 16, 8, 1), 256: (4, 16, 8, 1)},
    "int8": {64: (4, 16, 4, 1), 128: (2, 16, 8, 1), 256: (4, 16, 8, 1)},
    "int4": {64: (2, 16, 2, 1), 128: (2, 16, 4, 1), 256: (4, 16, 8, 1)},
}
DOT_CAPABILITY = (8, 0)
MAX_SPLITS = 16


def has_dot(capability: tuple[int, int]) -> bool:
    return capability >= DOT_CAPABILITY


def decode_cut(capability: tuple[int, int], head_dim: int, group: int, wide: bool, kind: str = "native") -> Cut:
    """The sizes for single tokens; `group` query heads share a KV head, and `wide` means a float32 model.

    `kind` is the narrower of the formats of keys and values: native, int8 or int4.
    """
    if has_dot(capability):
        return _with_dot((_WIDE if wide else _DECODE)[_size(head_dim)], group)
    rows, keys, warps, stages = _DECODE_NO_DOT[kind][_size(head_dim)]
    heads = min(rows, group)
    return Cut(_power(heads), heads, keys, warps, stages, dot=False)


def extend_cut(head_dim: int, group: int, wide: bool, mixed: bool) -> Cut:
    """The sizes for runs of tokens, on GPUs with `has_dot`; `mixed` if keys and values have different formats."""
    sizes = _WIDE if wide else _EXTEND_MIXED if mixed else _EXTEND
    return _with_dot(sizes[_size(head_dim)], group)


def num_splits(programs: int, processors: int, longest: int, keys: int) -> int:
    """The number of splits, a power of two.

    There are enough programs to fill the GPU twice, none with fewer than four runs of keys.
    """
    wanted = min(2 * processors // programs, longest // (4 * keys), MAX_SPLITS)
    return _power(max(wanted, 1) + 1) // 2


def _with_dot(sizes: tuple[int, int, int, int], group: int) -> Cut:
    rows, keys, warps, stages = sizes
    return Cut(max(rows, _power(group)), group, keys, warps, stages)


def _size(head_dim: int) -> int:
    return max(64, _power(head_dim))


def _power(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
