"""Weight formats: their codes, groups, planes and sizes, and the dtypes that stand for them.

Torch-free, because the planner needs layouts before any tensor exists. Knows sizes, not values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, product, repeat
from math import prod
from types import MappingProxyType
from typing import NamedTuple, Self


class DType(NamedTuple):
    """The names and size of a dtype: in torch, in safetensors, and in options (dtypes of activations only)."""

    name: str
    safetensors: str
    nbytes: int
    option: str = ""


DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        dtype.name: dtype
        for dtype in (
            DType("float32", "F32", 4, "fp32"),
            DType("bfloat16", "BF16", 2, "bf16"),
            DType("float16", "F16", 2, "fp16"),
            DType("float64", "F64", 8),
            DType("int64", "I64", 8),
            DType("int32", "I32", 4),
            DType("int8", "I8", 1),
            DType("uint8", "U8", 1),
            DType("bool", "BOOL", 1),
        )
    }
)
# The dtypes of activations, by their name in options: bf16, fp16, fp32.
OPTION_DTYPES: Mapping[str, DType] = MappingProxyType({each.option: each for each in DTYPES.values() if each.option})
WEIGHT_DTYPES = tuple(each.name for each in OPTION_DTYPES.values())


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


# The orders in which codes lie in their plane; the manifest of a store calls them its layout. `rows`: row after row.
# `int4pack`: as torch's `_weight_int4pack_mm_for_cpu` reads 4-bit integers on AVX-512, 64 rows interleaved (int4.py).
# `nf4pack`: as bitsandbytes' fused product reads nf4 with AVX512-BF16, 32 rows interleaved (nf4.py).
# `tiles`: as the kernels of quant/native read all of them, 32 rows interleaved (tiles.py).
ROWS, INT4PACK, NF4PACK, TILES = "rows", "int4pack", "nf4pack", "tiles"
_BLOCK_ROWS = {ROWS: 1, INT4PACK: 64, NF4PACK: 32, TILES: 32}
# In order `tiles`, columns are read in chunks of this many.
TILE_COLUMNS = 32
# Row after row, codes of three bits and of pairs lie in chunks of this many columns, or of the largest part of it that
# divides K.
JOINED_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a matrix [N, K] of `dtype` in one format: its planes, and the bytes of the buffer that holds them.

    Row n of every plane belongs to row n of the matrix. The bytes of `row_block` rows are interleaved, so only whole
    blocks can be sliced; planes have N rounded up to whole blocks as their number of rows. `nbytes` is a multiple of
    ALIGNMENT, so layouts that are stored one after the other stay aligned. `codes` and `order` are the format's.
    """

    format: str
    shape: tuple[int, int]
    dtype: str
    planes: tuple[Plane, ...]
    nbytes: int
    codes: str
    order: str = ROWS

    @property
    def row_block(self) -> int:
        return _BLOCK_ROWS[self.order]

    @property
    def grouped(self) -> bool:
        """Whether groups of weights of a row have scales of their own."""
        return len(self.planes) > 1 and len(self.planes[1].shape) > 1

    @property
    def group(self) -> int:
        """The weights of a row that share a scale; K if the row has one scale, or none."""
        return self._weights_per_item(self.planes[1]) if self.grouped else self.shape[1]

    @property
    def block(self) -> int:
        """The weights of a row that share the factors of scales and zeros; 0 if the format has none."""
        return self._weights_per_item(self.planes[3]) if len(self.planes) > 3 else 0

    @property
    def paired(self) -> bool:
        """Whether scales have zeros beside them, and rows have factors (WeightFormat)."""
        return self.grouped and len(self.planes[1].shape) > 2

    def _weights_per_item(self, plane: Plane) -> int:
        return self.shape[1] // plane.shape[1 - plane.row_axis]


# The bits of codes for a weight, by type of codes: `none` are floats of the matrix's own dtype, `int8`, `int4` and
# `int3` integers (the latter from 0 to 15 and to 7), `nf4` and `e2m1` indices into a table of 16 values, and `vq2` into
# one of 32 pairs of values.
CODE_BITS: Mapping[str, float] = MappingProxyType(
    {"none": 0, "int8": 8, "int4": 4, "nf4": 4, "e2m1": 4, "int3": 3, "vq2": 2.5}
)
# Types of codes that are small integers, or halves of them.
INTEGER_CODES = ("int4", "e2m1", "int3", "vq2", "int8")


class Assumed(NamedTuple):
    """What plans assume of a format of `--quant` or `--experts` on a machine that nobody measured.

    The bytes of a weight that a GPU reads, with its scales; those that torch moves to multiply by it where no kernel
    does: unpacked, widened, read (tests/runtime/plan/test_device_costs.py); and the bytes per second that are packed by
    torch, and by two cores with the library of CPU kernels. `instructions` are those of a GPU for a weight in tiles of
    16, 32 and 64 rows, with which grouped products decode gate and up, by its major compute capability (8: the worst
    of 8.0, 8.9 and 12.0), from `python -m matrix.compiling.instructions 80 89 90 120` with Triton 3.7.1. Of the
    instructions that a GPU could start, the kernel starts `issue_share` on an H200 (docs/measurements/gpu/
    h200-kernels.json): scales in small groups are waited for.
    """

    weight_nbytes: float
    dense_nbytes: float
    pack_bytes_s: float
    native_pack_bytes_s: float
    instructions: Mapping[int, tuple[float, float, float]] = MappingProxyType({})
    issue_share: float = 0.4


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A weight format: the type of its codes, and the scales and zeros of its groups of weights.

    `group` weights of a row share a scale; None: the row has one. K must be a multiple of `group` and of `block`.
    `scales` and `zeros` are dtypes; e8m0 is a power of two as a biased exponent of eight bits. A weight is

        value(code) * scale                  without zeros; for int4, value(code) is code - 8, for int3 code - 4
        value(code) * scale                  of vq2, value(code) is a pair of values, of a pair of weights
        (code - zero) * scale                zeros uint8: zero points, as GPTQ and AWQ have them
        (code - zero / 16) * scale * factor  `paired`: zeros are beside scales, both 8-bit integers, in one plane
                                             [N, K/group, 2], and a row has a factor, float32
        code * scale * d - zero * dmin       with `block`: scales and zeros are 8-bit integers, and `block` weights
                                             share the factors d and dmin, float16, as in GGUF's Q4_K

    `order` is the order of codes. `rates` names another format that computes about as fast. `auto`: `--quant auto`
    considers it. `assumed` have the formats of `--quant` and `--experts`. `experts` is the format of routed experts,
    where that is another: all other matrices are in the one that `rates` names.
    """

    name: str
    codes: str
    group: int | None = None
    scales: str = ""
    zeros: str = ""
    block: int | None = None
    order: str = ROWS
    rates: str = ""
    auto: bool = False
    assumed: Assumed | None = None
    experts: str = ""

    def layout(self, shape: tuple[int, int], dtype: str) -> Layout:
        """The layout of a matrix of this shape and dtype. Raises FormatError if the format cannot hold it."""
        self._check(shape, dtype)
        lines = _BLOCK_ROWS[self.order]
        own = FORMATS[self.name].order
        if self.order in (NF4PACK, TILES) and (
            shape[0] % max(lines, _BLOCK_ROWS[own]) or (self.order == TILES and shape[1] % TILE_COLUMNS)
        ):
            # Whole blocks of padding would make the bytes of a model depend on the order of its codes.
            return self.in_order(own).layout(shape, dtype)
        tensors = list(self._tensors(-(-shape[0] // lines) * lines, shape[1], dtype))
        planes = lay_out((each[:3] for each in tensors), [each[3] for each in tensors])
        return Layout(self.name, shape, dtype, planes, end_of(planes), self.codes, self.order)

    def nbytes(self, shape: tuple[int, int], dtype: str) -> int:
        """The bytes of the buffer for a matrix of this shape and dtype, including the alignment of planes."""
        return self.layout(shape, dtype).nbytes

    def in_order(self, order: str) -> Self:
        """The same format with codes in another order. Raises FormatError for an order that these codes do not have."""
        if order not in self.orders:
            raise FormatError(f"Order {order!r} was found; codes of {self.name} lie in order {self.order!r}.")
        return replace(self, order=order)

    @property
    def orders(self) -> tuple[str, ...]:
        """The orders in which a model of this format may be held and stored, its own first; all take the same bytes."""
        if self.experts:
            return tuple(dict.fromkeys(order for each in self.parts for order in get_format(each).orders))
        own = FORMATS[self.name].order
        orders = (own,) if own == ROWS else (own, ROWS)
        if not CODE_BITS[self.codes] or self.block or (self.group and self.group % TILE_COLUMNS):
            return orders
        fused = self.codes == "nf4" and self.scales == "bfloat16"
        return (*orders, NF4PACK, TILES) if fused else (*orders, TILES)

    @property
    def paired(self) -> bool:
        """Whether scales have zeros beside them, integers both, and rows have factors."""
        return self.scales == "uint8" and not self.block

    @property
    def parts(self) -> tuple[str, str]:
        """The formats of all other matrices, and of routed experts, of a model in this format."""
        return (self.rates, self.experts) if self.experts else (self.name, self.name)

    @property
    def own_block(self) -> int:
        """The rows to whose multiple the format's own order pads a matrix."""
        return _BLOCK_ROWS[FORMATS[self.name].order]

    @property
    def whole_rows(self) -> bool:
        """Whether codes are int8 with a scale per row, which torch multiplies by such rows."""
        return self.codes == "int8" and self.group is None

    @property
    def reads_integers(self) -> bool:
        """Whether kernels multiply activations that are rounded to int8 by the codes as they are."""
        experts = bool(self.experts) and get_format(self.experts).reads_integers
        return experts or self.whole_rows or (self.codes in INTEGER_CODES and TILES in self.orders)

    def _tensors(self, rows: int, columns: int, dtype: str) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
        """The name, dtype, shape and axis of rows of each plane."""
        if not CODE_BITS[self.codes]:
            yield "codes", dtype, (rows, columns), 0
            return
        yield (
            ("codes", "int8", (rows, columns), 0)
            if self.codes == "int8"
            else ("codes", "uint8", (rows, int(columns * CODE_BITS[self.codes] / 8)), 0)
        )
        if self.group is None:
            yield "scales", self.scales, (rows,), 0
            return
        if self.paired:
            yield self._per_group("scales", self.scales, rows, columns // self.group, 2)
            yield "factors", "float32", (rows,), 0
            return
        yield self._per_group("scales", _PLANE_DTYPES.get(self.scales, self.scales), rows, columns // self.group)
        if self.zeros:
            yield self._per_group("zeros", self.zeros, rows, columns // self.group)
        if self.block:
            yield self._per_group("factors", "float16", rows, columns // self.block, 2)

    def _per_group(
        self, name: str, dtype: str, rows: int, groups: int, *parts: int
    ) -> tuple[str, str, tuple[int, ...], int]:
        axis = 0 if self.order in (ROWS, TILES) else 1
        return name, dtype, ((groups, rows, *parts) if axis else (rows, groups, *parts)), axis

    def _check(self, shape: tuple[int, int], dtype: str) -> None:
        if dtype not in WEIGHT_DTYPES:
            raise FormatError(
                f"A matrix of {dtype} was found; weights are one of {', '.join(WEIGHT_DTYPES)}. Convert it first."
            )
        if len(shape) != 2 or min(shape) < 1:
            raise FormatError(f"Shape {tuple(shape)} was found; {self.name} packs matrices [N, K] that are not empty.")
        if shape[1] % (multiple := self.block or self.group or 1):
            raise FormatError(
                f"A matrix {list(shape)} was found; {self.name} wants columns in multiples of {multiple},"
                " so that no block of weights spans two rows. Keep this matrix in int8 or none."
            )


_PLANE_DTYPES = {"e8m0": "uint8"}


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


def _formats_of_checkpoints() -> Iterator[WeightFormat]:
    """Formats in which quantized checkpoints are kept without quantizing them again."""
    # bitsandbytes, its absmax no longer nested.
    yield WeightFormat("nf4-f32", "nf4", 64, "float32", rates="nf4")
    # gpt-oss: `mxfp4`, but floats beside it stay as they are.
    yield WeightFormat("mxfp4-e8m0", "e2m1", 32, "e8m0", rates="mxfp4")
    # bitsandbytes LLM.int8(), and compressed-tensors' int8 by channel: `int8`, likewise.
    yield WeightFormat("int8-f32", "int8", None, "float32", rates="int8")
    for group, (short, scales) in product((32, 64, 128), (("f16", "float16"), ("bf16", "bfloat16"))):
        # Q4_0 is int4-g32-f16. GPTQ, AWQ and compressed-tensors have zero points, the symmetric ones do not.
        int4 = WeightFormat(f"int4-g{group}-{short}", "int4", group, scales, order=INT4PACK, rates="int4")
        yield int4
        yield replace(int4, name=f"{int4.name}-zp", zeros="uint8")
        # Q8_0 is int8-g32-f16.
        yield WeightFormat(f"int8-g{group}-{short}", "int8", group, scales, rates="int8")
    yield WeightFormat("q4_k", "int4", 32, "uint8", "uint8", block=256, order=INT4PACK, rates="int4")


# The formats that `--quant` offers: checkpoints are quantized to these. nf4's scales (absmax) are bfloat16: for a
# bfloat16 checkpoint that is exact (a block's maximum is one of its weights), and unlike float16 it neither overflows
# nor underflows. int8's scales stay float32: one per row costs less than 0.1 bit a weight. From exact to smallest;
# mxfp4 is as large as nf4 and loses more, so `auto` leaves it to checkpoints that have it. Rates of packing: as planned
# where nobody measured (docs/dev/internals.md), and a quarter of what two cores packed (bench/results/cpu-products.md).
QUANT_FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        each.name: each
        for each in (
            WeightFormat(
                "none",
                "none",
                auto=True,
                assumed=Assumed(2.0, 2.0, 4e8, 1e9, {8: (1.7, 2.4, 4.5), 9: (1.6, 2.2, 3.4)}),
            ),
            WeightFormat(
                "int8",
                "int8",
                None,
                "float32",
                auto=True,
                assumed=Assumed(1.0, 5.0, 1.5e8, 3e9, {8: (3.5, 4.4, 6.6), 9: (3.5, 5.0, 3.1)}),
            ),
            WeightFormat(
                "int4",
                "int4",
                32,
                "uint8",
                "uint8",
                auto=True,
                assumed=Assumed(0.57, 19.1, 6e6, 1.2e9, {8: (3.6, 5.1, 6.2), 9: (3.6, 5.1, 5.0)}, 0.22),
            ),
            WeightFormat(
                "nf4",
                "nf4",
                64,
                "bfloat16",
                auto=True,
                assumed=Assumed(0.53, 4.6, 6e7, 2.5e9, {8: (4.6, 5.4, 6.5), 9: (4.5, 5.3, 4.7)}),
            ),
            WeightFormat(
                "mxfp4",
                "e2m1",
                32,
                "e8m0",
                rates="nf4",
                assumed=Assumed(0.53, 4.6, 6e7, 2e9, {8: (3.7, 5.3, 6.3), 9: (3.7, 5.2, 5.6)}, 0.3),
            ),
        )
    }
)
# What `--experts` offers: matrices of routed experts alone are quantized to these. `auto` takes none of them.
EXPERT_FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        "int3": WeightFormat(
            "int3",
            "int3",
            32,
            "bfloat16",
            rates="int4",
            assumed=Assumed(0.44, 19.1, 6e6, 1.2e9, {8: (2.7, 3.7, 4.8), 9: (2.7, 3.6, 4.7)}, 0.3),
        ),
        "vq2": WeightFormat(
            "vq2",
            "vq2",
            64,
            "bfloat16",
            rates="int4",
            assumed=Assumed(0.34, 30.0, 2.6e6, 1e8, {8: (3.6, 4.6, 5.7), 9: (3.6, 4.5, 4.3)}, 0.3),
        ),
    }
)
# Of these, what is useless unless a text says which columns matter.
CALIBRATED = frozenset({"vq2"})
# A model with such experts, by the name that plans, stores and journals have for the formats of both: int8+int3.
MIXED_FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        name: replace(each, name=name, rates=each.name, auto=False, assumed=None, experts=experts)
        for each, experts in product(QUANT_FORMATS.values(), EXPERT_FORMATS)
        if (name := f"{each.name}+{experts}")
    }
)
ASSUMED: Mapping[str, Assumed] = MappingProxyType(
    {name: each.assumed for name, each in chain(QUANT_FORMATS.items(), EXPERT_FORMATS.items()) if each.assumed}
)
FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {**QUANT_FORMATS, **EXPERT_FORMATS, **{each.name: each for each in _formats_of_checkpoints()}}
)


def get_format(name: str) -> WeightFormat:
    """The format of this name, which may be a mixed one. Raises FormatError, which lists those of `--quant`."""
    found = FORMATS.get(name) or MIXED_FORMATS.get(name)
    if found is None:
        raise FormatError(f"Weight format {name!r} is unknown; use one of {', '.join(QUANT_FORMATS)}.")
    return found


# Below this size torch runs an operation on the calling thread, and a core's cache holds the chunk's float32 copies.
CHUNK = 1 << 15
# The chunk of packing, which computes every chunk on one thread (tensor.pack_into): in smaller ones the calls of twenty
# operations take longer than what they compute, larger ones leave the second cache. If threads shared the operations,
# each would end in a barrier, and another busy process would make packing ten to a hundred times slower.
PACK_CHUNK = 1 << 17


def row_chunks(shape: tuple[int, int], row_block: int = 1, chunk: int | None = None) -> Iterator[slice]:
    """Slices of whole blocks of rows of a matrix [N, K], each of fewer than `chunk` numbers, or CHUNK.

    A block that has more is a slice of its own.
    """
    num_rows, num_columns = shape
    rows = max(1, ((chunk or CHUNK) - 1) // num_columns // row_block) * row_block
    return (slice(start, start + rows) for start in range(0, num_rows, rows))
