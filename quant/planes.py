"""Packed matrices from the planes of a quantized checkpoint without quantizing again, and in other orders of codes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .formats import int4, mxfp4, nf4, tiles
from .formats.format import CODE_BITS, NF4PACK, ROWS, TILES, FormatError, Layout, get_format, row_chunks
from .tensor import PackedTensor, bind_cleared, dtype_name


class Planes(NamedTuple):
    """The planes of a matrix [N, K], row after row whatever the order of its format.

    `codes` are int8 [N, K], or uint8 [N, K/2]: two codes of four bits a byte, the first in the low bits (nf4: in the
    high bits). `scales` are [N] or [N, K/group]; `zeros` [N, K/group]; `factors` float16 [N, K/block, 2]: of scales and
    of zeros. Dtypes are those of the format (WeightFormat); e8m0 is uint8.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    factors: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]"""
        return self.codes.shape[0], self.codes.shape[1] * (2 if self.codes.dtype == torch.uint8 else 1)


def pack_nibbles(numbers: Tensor, high_first: bool = False) -> Tensor:
    """Numbers from 0 to 15 [N, K] as uint8 [N, K/2], the first of two in the low bits, or in the high bits."""
    first, second = numbers.to(torch.uint8).reshape(len(numbers), -1, 2).unbind(2)
    return torch.bitwise_or(second, first << 4) if high_first else torch.bitwise_or(first, second << 4)


def unpack_nibbles(codes: Tensor, high_first: bool = False) -> Tensor:
    """The inverse of `pack_nibbles`: uint8 [N, K]."""
    halves = [codes >> 4, codes & 15] if high_first else [codes & 15, codes >> 4]
    return torch.stack(halves, 2).flatten(1)


def from_planes(format_name: str, planes: Planes, dtype: str, order: str | None = None) -> PackedTensor:
    """A new packed matrix with these planes, in `order` or the format's own; `dtype` is that of the layout.

    No number is rounded: codes and scales are copied. Raises FormatError as `fill` does.
    """
    chosen = get_format(format_name)
    layout = (chosen.in_order(order) if order else chosen).layout(planes.shape, dtype)
    return fill(planes, layout, planes.codes.new_empty(layout.nbytes, dtype=torch.uint8))


def fill(planes: Planes, layout: Layout, buffer: Tensor) -> PackedTensor:
    """Copies planes into `buffer`, uint8 [layout.nbytes], in the order of the layout, and binds it.

    Bytes between planes become 0. Raises FormatError if planes and layout do not match, or if scales are NaN or
    infinite.
    """
    _check(planes, layout)
    packed = bind_cleared(layout, buffer)
    if layout.order == ROWS:
        for plane, given in zip(packed.planes, _given(planes), strict=True):
            plane.copy_(given)
        return packed
    num_rows, (codes, *others) = layout.shape[0], packed.planes
    if layout.order == TILES:
        for rows in row_chunks(layout.shape, layout.row_block):
            tiles.interleave_codes(planes.codes[rows].contiguous(), codes[rows], layout.codes == "nf4")
        for plane, given in zip(others, _paired(planes), strict=True):
            plane.copy_(given) if plane.dim() == 1 else tiles.interleave_groups(given, plane)
        return packed
    for rows in row_chunks(layout.shape, layout.row_block):
        if layout.order == NF4PACK:
            nf4.interleave(planes.codes[rows], codes[rows])
            continue
        numbers = unpack_nibbles(planes.codes[rows])
        whole = len(codes[rows])
        int4.interleave(torch.nn.functional.pad(numbers, (0, 0, 0, whole - len(numbers))), codes[rows])
    for plane, given in zip(others, _paired(planes), strict=True):
        plane[:, num_rows:].zero_()
        plane[:, :num_rows].copy_(given.transpose(0, 1))
    return packed


def planes_of(packed: PackedTensor) -> Planes:
    """The planes of a packed matrix, row after row: views where the matrix has this order, else copies."""
    layout = packed.layout
    if not CODE_BITS[layout.codes]:
        raise FormatError(f"A matrix in {layout.format} was found; only quantized ones have codes and scales.")
    if layout.order == ROWS:
        return Planes(*packed.planes)
    if layout.order == TILES:
        made, *others = tiles.by_rows(packed.planes, layout.codes == "nf4")
        return Planes(made, *(others[0].unbind(2) if others[0].dim() == 3 else others))
    num_rows, (codes, *others) = layout.shape[0], packed.planes
    chunks = list(row_chunks(layout.shape, layout.row_block))
    if layout.order == NF4PACK:
        made = torch.cat([nf4.deinterleave(codes[rows]) for rows in chunks])
    else:
        numbers = [int4.deinterleave(codes[rows])[: num_rows - rows.start] for rows in chunks]
        made = pack_nibbles(torch.cat(numbers))
    by_row = [plane[:, :num_rows].transpose(0, 1) for plane in others]
    if by_row[0].dim() == 3:
        by_row = list(by_row[0].unbind(2))
    return Planes(made, *by_row)


def relayout(packed: PackedTensor, order: str) -> PackedTensor:
    """The same matrix with its codes in another order; no checkpoint is needed and no number changes.

    Returns `packed` itself if that is its order. Raises FormatError for an order that these codes do not have.
    """
    if packed.layout.order == order:
        return packed
    return from_planes(packed.layout.format, planes_of(packed), packed.layout.dtype, order)


def _check(planes: Planes, layout: Layout) -> None:
    wanted = get_format(layout.format).in_order(ROWS).layout(layout.shape, layout.dtype).planes
    found = [(list(each.shape), dtype_name(each.dtype)) for each in _given(planes)]
    if found != [(list(plane.shape), plane.dtype) for plane in wanted]:
        named = [(plane.name, list(plane.shape), plane.dtype) for plane in wanted]
        raise FormatError(
            f"Planes {found} were found; {layout.format} {list(layout.shape)} wants {named}."
            " Convert them, or use another format."
        )
    for plane, given in zip(wanted, _given(planes), strict=True):
        exponents = plane.name == "scales" and get_format(layout.format).scales == "e8m0"
        if (given == mxfp4.NAN).any() if exponents else not given.isfinite().all():
            raise FormatError(
                f"NaN or infinite {plane.name} were found in a matrix {list(layout.shape)}; finite ones are wanted."
                " The checkpoint is damaged: download it again or use another one."
            )


def _given(planes: Planes) -> list[Tensor]:
    return [each for each in planes if each is not None]


def _paired(planes: Planes) -> list[Tensor]:
    """The planes after the codes as INT4PACK and TILES have them: scales and zeros of a float dtype are one plane."""
    _, scales, zeros, factors = planes
    if zeros is not None and zeros.is_floating_point():
        return [torch.stack((scales, zeros), 2)]
    return [each for each in (scales, zeros, factors) if each is not None]
