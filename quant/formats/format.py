"""Layouts of weight formats: the planes of a packed matrix, their offsets in its buffer, and its bytes.

Torch-free, because the planner needs layouts before any tensor exists. Knows sizes, not values.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from math import prod
from types import MappingProxyType

from .dtypes import DTYPES, WEIGHT_DTYPES

# One cache line (bytes): at such offsets, aligned vector loads and views of any dtype are legal.
ALIGNMENT = 64


class FormatError(ValueError):
    """A format is unknown or cannot hold the matrix; the message says which formats can.

    This floor knows no exit codes: the caller that applies a user's setting converts it to a SettingError.
    """


@dataclass(frozen=True, slots=True)
class Plane:
    """One row-major tensor inside a buffer, `offset` bytes from its start.

    `row_axis` is the axis whose index is the row of the matrix.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    row_axis: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].nbytes


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a matrix [N, K] of `dtype` in one format: its planes, and the bytes of the buffer that holds them.

    Row n of every plane belongs to row n of the matrix. The bytes of `row_block` rows are interleaved, so only whole
    blocks can be sliced; planes have N rounded up to whole blocks as their number of rows. `nbytes` is a multiple of
    ALIGNMENT, so layouts that are stored one after the other stay aligned.
    """

    format: str
    shape: tuple[int, int]
    dtype: str
    planes: tuple[Plane, ...]
    nbytes: int
    row_block: int = 1


@dataclass(frozen=True, slots=True)
class PlaneRule:
    """How a plane's shape follows from a matrix: one item per `weights_per_item` columns of a row (None: per row).

    `dtype` None is the matrix's own dtype. A plane with `parts` has that many numbers per item and has the rows on its
    second axis: [items, N, parts].
    """

    name: str
    dtype: str | None
    weights_per_item: int | None = 1
    parts: int | None = None

    @property
    def row_axis(self) -> int:
        return 0 if self.parts is None else 1

    def shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """The shape of the plane for a matrix of this shape."""
        num_rows, num_columns = shape
        if self.weights_per_item is None:
            return (num_rows,)
        items = num_columns // self.weights_per_item
        return (num_rows, items) if self.parts is None else (items, num_rows, self.parts)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A weight format. It stores matrices [N, K] whose K is a multiple of `group_size`."""

    name: str
    rules: tuple[PlaneRule, ...]
    group_size: int = 1
    row_block: int = 1

    def layout(self, shape: tuple[int, int], dtype: str) -> Layout:
        """The layout of a matrix of this shape and dtype. Raises FormatError if the format cannot hold it."""
        self._check(shape, dtype)
        blocks = (-(-shape[0] // self.row_block) * self.row_block, shape[1])
        planes = lay_out(
            ((rule.name, rule.dtype or dtype, rule.shape(blocks)) for rule in self.rules),
            [rule.row_axis for rule in self.rules],
        )
        return Layout(self.name, shape, dtype, planes, end_of(planes), self.row_block)

    def nbytes(self, shape: tuple[int, int], dtype: str) -> int:
        """The bytes of the buffer for a matrix of this shape and dtype, including the alignment of planes."""
        return self.layout(shape, dtype).nbytes

    def _check(self, shape: tuple[int, int], dtype: str) -> None:
        if dtype not in WEIGHT_DTYPES:
            raise FormatError(
                f"A matrix of {dtype} was found; weights are one of {', '.join(WEIGHT_DTYPES)}. Convert it first."
            )
        if len(shape) != 2 or min(shape) < 1:
            raise FormatError(f"Shape {tuple(shape)} was found; {self.name} packs matrices [N, K] that are not empty.")
        if shape[1] % self.group_size:
            raise FormatError(
                f"A matrix {list(shape)} was found; {self.name} wants columns in multiples of {self.group_size},"
                " so that no block of weights spans two rows. Keep this matrix in int8 or none."
            )


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]], row_axes: Iterable[int] = ()) -> tuple[Plane, ...]:
    """The planes for tensors (name, dtype, shape) one after the other in a buffer, each at a multiple of ALIGNMENT."""
    planes: list[Plane] = []
    for (name, dtype, shape), axis in zip(tensors, chain(row_axes, repeat(0)), strict=False):
        planes.append(Plane(name, dtype, shape, end_of(planes), axis))
    return tuple(planes)


def end_of(planes: Iterable[Plane]) -> int:
    """The bytes of the buffer that holds these planes, rounded up to ALIGNMENT."""
    end = max((plane.offset + plane.nbytes for plane in planes), default=0)
    return -(-end // ALIGNMENT) * ALIGNMENT


# nf4's absmax is bfloat16: for a bfloat16 checkpoint it is exact (a block's maximum is one of its weights), and unlike
# float16 it neither overflows nor underflows. int8's scales stay float32: one per row costs less than 0.1 bit a weight.
FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        "none": WeightFormat("none", (PlaneRule("weight", None),)),
        "int8": WeightFormat("int8", (PlaneRule("codes", "int8"), PlaneRule("scales", "float32", None))),
        # The layout of torch's CPU kernel on AVX-512: 64 rows are interleaved; scale and zero point are bfloat16.
        "int4": WeightFormat(
            "int4",
            (PlaneRule("codes", "uint8", 2), PlaneRule("scales", "bfloat16", 32, parts=2)),
            group_size=32,
            row_block=64,
        ),
        "nf4": WeightFormat(
            "nf4", (PlaneRule("codes", "uint8", 2), PlaneRule("absmax", "bfloat16", 64)), group_size=64
        ),
    }
)


def get_format(name: str) -> WeightFormat:
    """The format of this name. Raises FormatError, which lists the known names."""
    if name not in FORMATS:
        raise FormatError(f"Weight format {name!r} is unknown; use one of {', '.join(FORMATS)}.")
    return FORMATS[name]
