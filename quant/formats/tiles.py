"""Order `tiles`: blocks of 32 rows whose codes, scales and zeros lie as the kernels of quant/native read them.

Every plane has the shape that it has row after row. The bytes of a block are ordered as [K/group, 32, ...] in planes of
scales and zeros; as [K/2, 32, 2] in codes of eight bits; and as [K/2, 16, 2] in codes of four bits, where the byte of
row i and column p of a pair has row i in the low bits and row 16 + i in the high bits (so do the codes of order
`nf4pack`). Codes of three bits, and of pairs, are joined (int3.py) in chunks of 32 columns, which are ordered as
[n, 2, 16, 4]: four codes of 16 rows lie together, then those of the other 16; n is 8, of pairs 4. What whole rows have
is not ordered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..native import calls
from . import int3, vq2
from .format import row_chunks

BLOCK_ROWS = 32
# The bytes of four codes of half a block, where codes are joined; of such codes the bytes of a chunk of a row, the bits
# that lie in lower ones, and what orders them row after row.
_RUN = 2 * BLOCK_ROWS
_JOINED = {"int3": (12, 2, int3), "vq2": (10, vq2.LOW_BITS, vq2)}


def interleave_codes(codes: Tensor, out: Tensor, kind: str) -> None:
    """Writes codes of type `kind`, row after row, into `out` in order `tiles`; rows are a multiple of BLOCK_ROWS."""
    if kind in _JOINED:
        nbytes, bits, codec = _JOINED[kind]
        rows = codec.split_rows(codes).view(-1, 2, BLOCK_ROWS // 2, codes.shape[1] // nbytes, 16 // bits, 4)
        out.view(-1).copy_(int3.join(rows.permute(0, 3, 4, 1, 2, 5).flatten(2), _RUN, bits).view(-1))
        return
    if kind == "int8":
        _bytes(out).copy_(codes.view(-1, BLOCK_ROWS, codes.shape[1] // 2, 2).transpose(1, 2))
        return
    upper, lower = codes.view(-1, 2, BLOCK_ROWS // 2, codes.shape[1]).unbind(1)
    low, high = lower << 4 | upper & 15, lower & 0xF0 | upper >> 4
    pair = torch.stack((high, low) if kind == "nf4" else (low, high), -1)
    _nibbles(out).copy_(pair.transpose(1, 2))


def deinterleave_codes(codes: Tensor, kind: str) -> Tensor:
    """The inverse of `interleave_codes`: row after row, in the shape of `codes`."""
    if kind in _JOINED:
        nbytes, bits, codec = _JOINED[kind]
        chunks = int3.split(codes.view(-1).view(-1, codes.shape[1] // nbytes, nbytes * BLOCK_ROWS), _RUN, bits)
        rows = chunks.view(*chunks.shape[:2], -1, 2, BLOCK_ROWS // 2, 4).permute(0, 3, 4, 1, 2, 5)
        joined: Tensor = codec.join_rows(rows.reshape(len(codes), -1))
        return joined
    if kind == "int8":
        return _bytes(codes).transpose(1, 2).reshape(codes.shape)
    first, second = _nibbles(codes).transpose(1, 2).unbind(-1)
    if kind == "nf4":
        first, second = second, first
    upper, lower = second << 4 | first & 15, second & 0xF0 | first >> 4
    return torch.stack((upper, lower), 1).reshape(codes.shape)


def interleave_groups(plane: Tensor, out: Tensor) -> None:
    """Writes scales, zeros or factors [n, G, ...], row after row, into `out` in order `tiles`."""
    _groups(out).copy_(plane.reshape(-1, BLOCK_ROWS, *plane.shape[1:]).transpose(1, 2))


def deinterleave_groups(plane: Tensor) -> Tensor:
    """The inverse of `interleave_groups`."""
    return _groups(plane).transpose(1, 2).reshape(plane.shape)


def by_rows(planes: tuple[Tensor, ...], kind: str) -> tuple[Tensor, ...]:
    """The planes of whole blocks of codes of a type, row after row; scales of whole rows are in no other order."""
    codes, *others = planes
    grouped = (each if each.dim() == 1 else deinterleave_groups(each) for each in others)
    return (deinterleave_codes(codes, kind), *grouped)


class TilesCodec:
    """The codec (tensor.Codec) of the codes, of type `codes`, that the codec `rows` packs and unpacks row after row."""

    def __init__(self, codes: str, rows: Any) -> None:
        self._codes = codes
        self._rows = rows

    def pack(self, weight: Tensor, planes: tuple[Tensor, ...], *importance: Tensor) -> None:
        made = tuple(torch.empty_like(plane) for plane in planes)
        self._rows.pack(weight, made, *importance)
        interleave_codes(made[0], planes[0], self._codes)
        for plane, out in zip(made[1:], planes[1:], strict=True):
            if plane.dim() == 1:
                out.copy_(plane)
            else:
                interleave_groups(plane, out)

    def unpack(self, planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
        if calls.widen_tiles(self._codes, planes, out):
            return
        for rows in row_chunks((len(out), out.shape[1]), BLOCK_ROWS):
            part = by_rows(tuple(plane[rows] for plane in planes), self._codes)
            self._rows.unpack(part, out[rows], wide[rows])


def _nibbles(codes: Tensor) -> Tensor:
    """The bytes of codes [n, K/2] in memory order: [n/32, K/2, 16, 2]."""
    return codes.view(-1).view(-1, codes.shape[1], BLOCK_ROWS // 2, 2)


def _bytes(codes: Tensor) -> Tensor:
    """The codes int8 [n, K] in memory order: [n/32, K/2, 32, 2]."""
    return codes.view(-1).view(-1, codes.shape[1] // 2, BLOCK_ROWS, 2)


def _groups(plane: Tensor) -> Tensor:
    """The numbers of a plane [n, G, ...] in memory order: [n/32, G, 32, ...]."""
    return plane.view(-1).view(-1, plane.shape[1], BLOCK_ROWS, *plane.shape[2:])
