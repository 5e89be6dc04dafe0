"""Packed matrices: one flat buffer cut into planes, and the codec of each weight format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Protocol, Self

import torch
from torch import Tensor

from . import packing
from .formats import int4, int8, mxfp4, nf4, plain, tiles
from .formats.format import (
    ALIGNMENT,
    CODE_BITS,
    DTYPES,
    INT4PACK,
    NF4PACK,
    OPTION_DTYPES,
    PACK_CHUNK,
    ROWS,
    TILES,
    WEIGHT_DTYPES,
    FormatError,
    Layout,
    Plane,
    get_format,
    row_chunks,
)
from .native.library import NativeMatrix
from .scratch import wide_columns


class Codec(Protocol):
    """Converts n consecutive rows of a matrix [N, K] to the same rows of its planes, and back.

    `planes` are those of the layout and have R rows, n rounded up to whole blocks. `wide` is float32
    scratch [R, scratch.wide_columns].
    """

    def pack(self, weight: Tensor, planes: tuple[Tensor, ...]) -> None:
        """Fills the planes from `weight` [n, K], finite, with any strides."""

    def unpack(self, planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
        """Writes the rows into `out` [n, K], contiguous, of any weight dtype."""

    def unpack_unscaled(self, planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> tuple[Tensor, Tensor | None]:
        """Unpacks the rows without the scales that are cheaper to apply to a product; returns (matrix, scales).

        The matrix [n, K], of any strides, is in the memory of `out`, scratch [R, K]. `scales` [n] are the factors per
        row that are still to be applied; None if the matrix has all of them.
        """


# By the type and the order of codes.
CODECS: Mapping[tuple[str, str], Codec] = MappingProxyType(
    {
        ("none", ROWS): plain,
        ("int8", ROWS): int8,
        ("int4", INT4PACK): int4,
        ("int4", ROWS): int4.RowCodec(),
        ("nf4", ROWS): nf4,
        ("nf4", NF4PACK): nf4.FusedCodec(),
        ("e2m1", ROWS): mxfp4,
        ("int8", TILES): tiles.TilesCodec("int8", int8),
        ("int4", TILES): tiles.TilesCodec("int4", tiles.Int4Rows()),
        ("nf4", TILES): tiles.TilesCodec("nf4", nf4, high_first=True),
        ("e2m1", TILES): tiles.TilesCodec("e2m1", mxfp4),
    }
)


# Floats are multiplied by torch, which reads them at any multiple of their size.
FLOAT_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A packed matrix [N, K], always row-major: to multiply x @ w, pack the transpose of w.

    It does not own its bytes: new bytes in the buffer are a new matrix, so a slot that is filled repeatedly is bound
    once.
    """

    layout: Layout
    planes: tuple[Tensor, ...]
    # The matrix as kernels take it (matmul/tiled.py), from the first call on: asking for addresses takes longer.
    native: list[NativeMatrix] = field(default_factory=list, compare=False, repr=False)

    @classmethod
    def bind(cls, layout: Layout, buffer: Tensor) -> Self:
        """Makes views of `buffer`, uint8 [layout.nbytes], without a copy. Raises FormatError if it does not fit."""
        aligned = ALIGNMENT if CODE_BITS[layout.codes] else FLOAT_ALIGNMENT
        if buffer.dtype != torch.uint8 or buffer.shape != (layout.nbytes,) or buffer.data_ptr() % aligned:
            raise FormatError(
                f"A buffer {list(buffer.shape)} of {buffer.dtype} at address {buffer.data_ptr():#x} was found;"
                f" {layout.format} {list(layout.shape)} wants uint8 [{layout.nbytes}] at a multiple of {aligned}."
            )
        return cls(layout, tuple([view(buffer, plane) for plane in layout.planes]))

    @classmethod
    def wrap(cls, weight: Tensor) -> Self:
        """A contiguous float matrix [N, K] in format `none`, without a copy; for an embedding that is also the head."""
        layout = get_format("none").layout((weight.shape[0], weight.shape[1]), dtype_name(weight.dtype))
        return cls(layout, (weight,))

    @property
    def shape(self) -> tuple[int, int]:
        return self.layout.shape

    def rows(self, rows: slice) -> tuple[Tensor, ...]:
        """The planes of a slice of rows that starts at a block, up to the end of its last block."""
        block = self.layout.row_block
        stop = -(-min(rows.stop, self.shape[0]) // block) * block
        return tuple(
            [
                tensor.narrow(plane.row_axis, rows.start, stop - rows.start)
                for tensor, plane in zip(self.planes, self.layout.planes, strict=True)
            ]
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrix that was packed; products may use another one."""
        return torch_dtype(self.layout.dtype)

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def dequantize(self, out: Tensor | None = None) -> Tensor:
        """The matrix [N, K], in `out` if given (contiguous, any weight dtype), else in a new tensor of its own dtype.

        Raises FormatError if `out` does not fit.
        """
        if out is None:
            out = self.planes[0].new_empty(self.shape, dtype=self.dtype)
        if out.shape != self.shape or not out.is_contiguous() or dtype_name(out.dtype) not in WEIGHT_DTYPES:
            raise FormatError(
                f"An output {list(out.shape)} of {out.dtype}, strides {out.stride()}, was found; dequantizing wants"
                f" a contiguous {list(self.shape)} of {', '.join(WEIGHT_DTYPES)}."
            )
        blocks = -(-len(out) // self.layout.row_block) * self.layout.row_block
        wide = out.new_empty(blocks, wide_columns(self.layout), dtype=torch.float32)
        CODECS[self.layout.codes, self.layout.order].unpack(self.planes, out, wide)
        return out


# Calls a function for each of many slices, which do not depend on one another, and returns when all calls have ended.
ForEach = Callable[[Iterable[slice], Callable[[slice], None]], None]


def _in_turn(slices: Iterable[slice], work: Callable[[slice], None]) -> None:
    for rows in slices:
        work(rows)


def pack_into(weight: Tensor, layout: Layout, buffer: Tensor, for_each: ForEach = _in_turn) -> PackedTensor:
    """Packs `weight` [N, K] into `buffer` and binds it. Bytes between planes become 0, so that checksums are equal.

    `for_each` may share chunks of rows among threads; each chunk is packed on one thread, whatever the number of
    torch's, and the bytes are the same. Raises FormatError if weight, layout and buffer do not match, or if weights are
    NaN or infinite; the buffer then has some of the chunks.
    """
    if tuple(weight.shape) != layout.shape or weight.dtype != torch_dtype(layout.dtype):
        raise FormatError(
            f"A weight {list(weight.shape)} of {weight.dtype} was found; this layout wants {list(layout.shape)} of"
            f" {layout.dtype}. Convert the weight, or make its own layout."
        )
    packed = bind_cleared(layout, buffer)
    library = packing.takes(weight, layout)
    pack_part = packing.pack_rows if library else _pack_by_codec

    def pack_rows(rows: slice) -> None:
        if not pack_part(weight[rows], layout, packed.rows(rows)):
            raise _not_finite(weight)

    for_each(row_chunks(layout.shape, layout.row_block, packing.CHUNK if library else PACK_CHUNK), pack_rows)
    return packed


def _pack_by_codec(part: Tensor, layout: Layout, planes: tuple[Tensor, ...]) -> bool:
    """Packs some rows on one thread; False if weights are NaN or infinite."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if finite := is_finite(part):
            CODECS[layout.codes, layout.order].pack(part, planes)
        return finite
    finally:
        torch.set_num_threads(num_threads)


# The bits of infinity; larger ones are NaN.
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


def is_finite(part: Tensor) -> bool:
    """Whether no weight is NaN or infinite. Magnitudes of 16 bits are in the order of their bits, which is faster."""
    if part.dtype in _INFINITY:
        return bool(torch.bitwise_and(part.view(torch.int16), 0x7FFF).amax() < _INFINITY[part.dtype])
    return bool(torch.stack(torch.aminmax(part)).isfinite().all())


def _not_finite(weight: Tensor) -> FormatError:
    count = weight.numel() - int(weight.isfinite().sum())
    return FormatError(
        f"{count} NaN or infinite weights were found in a matrix {list(weight.shape)}; finite ones are wanted."
        " The checkpoint is damaged or was saved from a diverged run: download it again or use another one."
    )


def bind_cleared(layout: Layout, buffer: Tensor) -> PackedTensor:
    """Binds `buffer` as PackedTensor.bind does, and writes zeros between and after its planes."""
    packed = PackedTensor.bind(layout, buffer)
    for plane, following in zip(layout.planes, (*layout.planes[1:], None), strict=True):
        buffer[plane.offset + plane.nbytes : following.offset if following else None].zero_()
    return packed


def pack(weight: Tensor, format_name: str, order: str | None = None) -> PackedTensor:
    """Packs `weight` [N, K] into a new buffer on its device, with codes in `order` or the format's own."""
    chosen = get_format(format_name)
    num_rows, num_columns = weight.shape
    layout = chosen.in_order(order or chosen.order).layout((num_rows, num_columns), dtype_name(weight.dtype))
    return pack_into(weight, layout, weight.new_empty(layout.nbytes, dtype=torch.uint8))


def view(buffer: Tensor, plane: Plane) -> Tensor:
    """The plane's tensor, a view of `buffer` (uint8, flat).

    Uses as_strided, since slicing and reshaping take twice as long and this runs thousands of times per pass.
    """
    typed = buffer.view(torch_dtype(plane.dtype))
    offset = buffer.storage_offset() + plane.offset
    return typed.as_strided(plane.shape, _strides(plane.shape), offset // typed.itemsize)


@cache
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor; cached, since a model has a handful of shapes."""
    return tuple([prod(shape[axis + 1 :]) for axis in range(len(shape))])


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name such as bfloat16."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as layouts have it: bfloat16, not torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


# torch's dtypes by their names in options, and by their names in safetensors.
TORCH_DTYPES = {name: torch_dtype(each.name) for name, each in OPTION_DTYPES.items()}
SAFETENSORS_DTYPES = {each.safetensors: torch_dtype(each.name) for each in DTYPES.values()}
