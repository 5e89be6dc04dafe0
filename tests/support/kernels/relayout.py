"""A packed matrix of planes, its planes, and the matrix with its codes in another order, for comparisons."""

from __future__ import annotations

import torch

from moedge.quant.formats import int4, nf4, tiles
from moedge.quant.formats.format import CODE_BITS, NF4PACK, ROWS, TILES, FormatError, get_format, row_chunks
from moedge.quant.tensor import PackedTensor, Planes, fill, pack_nibbles


def from_planes(format_name: str, planes: Planes, dtype: str, order: str | None = None) -> PackedTensor:
    """A new packed matrix with these planes, in `order` or the format's own; `dtype` is that of the layout.

    No number is rounded: codes and scales are copied. Raises FormatError as `fill` does.
    """
    chosen = get_format(format_name)
    columns = int(planes.codes.shape[1] * 8 / CODE_BITS[chosen.codes])
    layout = (chosen.in_order(order) if order else chosen).layout((len(planes.codes), columns), dtype)
    return fill(planes, layout, planes.codes.new_empty(layout.nbytes, dtype=torch.uint8))


def planes_of(packed: PackedTensor) -> Planes:
    """The planes of a packed matrix, row after row: views where the matrix has this order, else copies."""
    layout = packed.layout
    if not CODE_BITS[layout.codes]:
        raise FormatError(f"A matrix in {layout.format} was found; only quantized ones have codes and scales.")
    if layout.order in (ROWS, TILES):
        found = packed.planes if layout.order == ROWS else tiles.by_rows(packed.planes, layout.codes)
        return Planes(**{plane.name: each for plane, each in zip(layout.planes, found, strict=True)})
    num_rows, (codes, *others) = layout.shape[0], packed.planes
    chunks = list(row_chunks(layout.shape, layout.row_block))
    if layout.order == NF4PACK:
        made = torch.cat([nf4.deinterleave(codes[rows]) for rows in chunks])
    else:
        numbers = [_int4_numbers(codes[rows])[: num_rows - rows.start] for rows in chunks]
        made = pack_nibbles(torch.cat(numbers))
    return Planes(made, *(plane[:, :num_rows].transpose(0, 1) for plane in others))


def relayout(packed: PackedTensor, order: str) -> PackedTensor:
    """The same matrix with its codes in another order; no checkpoint is needed and no number changes.

    Returns `packed` itself if that is its order. Raises FormatError for an order that these codes do not have.
    """
    if packed.layout.order == order:
        return packed
    return from_planes(packed.layout.format, planes_of(packed), packed.layout.dtype, order)


def _int4_numbers(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `int4.interleave`: uint8 [N, K]."""
    blocks = int4._blocks(codes).transpose(1, 2)
    return torch.stack((blocks & 15, blocks >> 4), 1).reshape(len(codes), -1)
