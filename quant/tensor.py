"""Packed matrices: one flat buffer cut into planes, made of floats or of the planes of a quantized checkpoint.

There is a codec for each weight format, in each order of its codes. A codec takes some twenty torch operations a chunk,
between which threads wait for Python's lock; the library of CPU kernels packs to the same bytes in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import POINTER, byref
from dataclasses import dataclass, field
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from .formats import int3, int4, int8, mxfp4, nf4, plain, tiles, vq2
from .formats.format import (
    ALIGNMENT,
    CODE_BITS,
    DTYPES,
    EXPERT_FORMATS,
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
from .native.library import ENUMS, NativePacking, available, function
from .scratch import wide_columns

_FORMATS, _ORDERS = ENUMS["weight_format"], ENUMS["order"]
# Codes that the library packs in order `tiles`, which it is asked for where they are to lie row after row.
_BY_TILES = ("int3", "vq2")
# Numbers of the rows that one call packs: few enough that threads end together, many enough that the call costs little.
LIBRARY_CHUNK = 1 << 18


def library_packs(weight: Tensor, layout: Layout) -> bool:
    """Whether `pack_by_library` packs such a matrix.

    What `--quant` makes of bfloat16 weights on a CPU, in every order that is used where there is the library. Others,
    and float16 and float32 weights, are left to the codecs.
    """
    orders = (ROWS,) if layout.codes == "int8" else tuple(_ORDERS)
    whole = layout.codes not in _BY_TILES or layout.shape[0] % tiles.BLOCK_ROWS == 0
    known = layout.format in _FORMATS and layout.order in orders and whole
    return known and layout.dtype == "bfloat16" and weight.device.type == "cpu" and available()


def pack_by_library(
    weight: Tensor, layout: Layout, planes: tuple[Tensor, ...], importance: Tensor | None = None
) -> bool:
    """Fills the planes of some rows of a matrix of this layout from `weight` [n, K]; without Python's lock.

    False, with some of the rows packed, if weights are NaN or infinite.
    """
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    if layout.codes in _BY_TILES and layout.order == ROWS:
        return _pack_by_tiles(weight, layout, planes, importance)
    codes, scales, *factors = planes
    some = NativePacking(
        x=weight.data_ptr(),
        stride=weight.stride(0),
        rows=weight.shape[0],
        columns=weight.shape[1],
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        factors=factors[0].data_ptr() if factors else None,
        importance=None if importance is None else importance.data_ptr(),
        format=_FORMATS[layout.format],
        order=_ORDERS[layout.order],
    )
    function("moedge_pack", POINTER(NativePacking))(byref(some))
    return bool(some.finite)


def _pack_by_tiles(weight: Tensor, layout: Layout, planes: tuple[Tensor, ...], importance: Tensor | None) -> bool:
    """`pack_by_library` in order `tiles`, then row after row."""
    tiled = get_format(layout.format).in_order(TILES).layout((weight.shape[0], weight.shape[1]), layout.dtype)
    made = PackedTensor.bind(tiled, torch.empty(tiled.nbytes, dtype=torch.uint8)).planes
    finite = pack_by_library(weight, tiled, made, importance)
    for plane, rows in zip(planes, tiles.by_rows(made, layout.codes), strict=True):
        plane.copy_(rows)
    return finite


class Codec(Protocol):
    """Converts n consecutive rows of a matrix [N, K] to the same rows of its planes, and back.

    `planes` are those of the layout and have R rows, n rounded up to whole blocks. `wide` is float32
    scratch [R, scratch.wide_columns].
    """

    def pack(self, weight: Tensor, planes: tuple[Tensor, ...]) -> None:
        """Fills the planes from `weight` [n, K], finite, with any strides."""

    def unpack(self, planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
        """Writes the rows into `out` [n, K], contiguous, of any weight dtype."""


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
        ("int4", TILES): tiles.TilesCodec("int4", int4.RowCodec()),
        ("nf4", TILES): tiles.TilesCodec("nf4", nf4),
        ("e2m1", TILES): tiles.TilesCodec("e2m1", mxfp4),
        ("int3", ROWS): int3,
        ("int3", TILES): tiles.TilesCodec("int3", int3),
        ("vq2", ROWS): vq2,
        ("vq2", TILES): tiles.TilesCodec("vq2", vq2),
    }
)


def unpack_unscaled(
    layout: Layout, planes: tuple[Tensor, ...], out: Tensor, wide: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Unpacks rows without the scales that are cheaper to apply to a product; returns (matrix, scales).

    The matrix [n, K], of any strides, is in the memory of `out`, scratch [R, K]. `scales` [n] are the factors per
    row that are still to be applied; None if the matrix has all of them.
    """
    kind = layout.codes, layout.order
    if own := {("int8", ROWS): int8.unpack_unscaled, ("int4", INT4PACK): int4.unpack_unscaled}.get(kind):
        return own(planes, out, wide)
    weight = out[: len(planes[0])]
    CODECS[kind].unpack(planes, weight, wide)
    return weight, None


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
    # The matrix as kernels of its order take it, from the first call on: asking for addresses takes longer.
    native: list[Any] = field(default_factory=list, compare=False, repr=False)

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


def in_turn(slices: Iterable[slice], work: Callable[[slice], None]) -> None:
    """The ForEach of one thread."""
    for rows in slices:
        work(rows)


@contextmanager
def one_thread() -> Iterator[None]:
    """While entered, torch computes what this thread asks of it by itself."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def pack_into(
    weight: Tensor,
    layout: Layout,
    buffer: Tensor,
    for_each: ForEach = in_turn,
    importance: Tensor | None = None,
) -> PackedTensor:
    """Packs `weight` [N, K] into `buffer` and binds it. Bytes between planes become 0, so that checksums are equal.

    `for_each` may share chunks of rows among threads; each chunk is packed on one thread, whatever the number of
    torch's, and the bytes are the same. `importance`, float32 [K], above 0, is how much squares of errors in a column
    count in the formats of experts (EXPERT_FORMATS); others have no use for it. Raises FormatError if weight, layout
    and buffer do not match, or if weights are NaN or infinite; the buffer then has some of the chunks.
    """
    if tuple(weight.shape) != layout.shape or weight.dtype != torch_dtype(layout.dtype):
        raise FormatError(
            f"A weight {list(weight.shape)} of {weight.dtype} was found; this layout wants {list(layout.shape)} of"
            f" {layout.dtype}. Convert the weight, or make its own layout."
        )
    packed = bind_cleared(layout, buffer)
    library = library_packs(weight, layout)
    pack_part = pack_by_library if library else _pack_by_codec
    columns = importance if layout.format in EXPERT_FORMATS else None

    def pack_rows(rows: slice) -> None:
        with one_thread():
            finite = pack_part(weight[rows], layout, packed.rows(rows), columns)
        if not finite:
            raise _not_finite(weight)

    block = tiles.BLOCK_ROWS if library and layout.codes in _BY_TILES else layout.row_block
    for_each(row_chunks(layout.shape, block, LIBRARY_CHUNK if library else PACK_CHUNK), pack_rows)
    return packed


def _pack_by_codec(part: Tensor, layout: Layout, planes: tuple[Tensor, ...], importance: Tensor | None = None) -> bool:
    """Packs some rows; False if weights are NaN or infinite."""
    if finite := is_finite(part):
        # Those of the formats of experts take it.
        pack_part: Callable[..., None] = CODECS[layout.codes, layout.order].pack
        pack_part(part, planes, *([] if importance is None else [importance]))
    return finite


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


class Planes(NamedTuple):
    """The planes of a matrix [N, K], row after row whatever the order of its format.

    `codes` are int8 [N, K], or uint8 [N, K/2]: two codes of four bits a byte, the first in the low bits (nf4: in the
    high bits), [N, 3 K/8] (int3.py) or [N, 5 K/16] (vq2.py). `scales` are [N] or [N, K/group]; `zeros` [N, K/group];
    `factors` float16 [N, K/block, 2]: of scales and of zeros. `int4` has scales [N, K/group, 2] with zeros beside them,
    and factors float32 [N]. Dtypes are those of the format (WeightFormat); e8m0 is uint8.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    factors: Tensor | None = None


def pack_nibbles(numbers: Tensor, high_first: bool = False) -> Tensor:
    """Numbers from 0 to 15 [N, K] as uint8 [N, K/2], the first of two in the low bits, or in the high bits."""
    first, second = numbers.to(torch.uint8).reshape(len(numbers), -1, 2).unbind(2)
    return torch.bitwise_or(second, first << 4) if high_first else torch.bitwise_or(first, second << 4)


def unpack_nibbles(codes: Tensor, high_first: bool = False) -> Tensor:
    """The inverse of `pack_nibbles`: uint8 [N, K]."""
    halves = [codes >> 4, codes & 15] if high_first else [codes & 15, codes >> 4]
    return torch.stack(halves, 2).flatten(1)


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
            tiles.interleave_codes(planes.codes[rows].contiguous(), codes[rows], layout.codes)
        for plane, given in zip(others, _given(planes)[1:], strict=True):
            plane.copy_(given) if plane.dim() == 1 else tiles.interleave_groups(given, plane)
        return packed
    for rows in row_chunks(layout.shape, layout.row_block):
        if layout.order == NF4PACK:
            nf4.interleave(planes.codes[rows], codes[rows])
            continue
        numbers = unpack_nibbles(planes.codes[rows])
        whole = len(codes[rows])
        int4.interleave(torch.nn.functional.pad(numbers, (0, 0, 0, whole - len(numbers))), codes[rows])
    for plane, given in zip(others, _given(planes)[1:], strict=True):
        plane[:, num_rows:].zero_()
        plane[:, :num_rows].copy_(given.transpose(0, 1))
    return packed


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
