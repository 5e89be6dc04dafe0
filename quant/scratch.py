"""The scratch memory of a matmul with a packed matrix, and the strips that the matrix is cut into to bound it.

Torch-free, because the planner counts these bytes. Knows sizes, not kernels.
"""

from collections.abc import Sequence

from .formats.format import TILE_COLUMNS, Layout, Plane, end_of, lay_out

# The number of weights that are dequantized at a time: 8 MiB of bfloat16. Larger strips are not faster, and the strip
# of an output head would be hundreds of MiB. It is constant, not part of a budget: it may change a result's last bits.
STRIP_WEIGHTS = 1 << 22
# The same number for deterministic products, each strip of which one thread computes, so that no bit depends on the
# number of threads. It is so small that a matrix of 2048 x 2048 keeps eight threads busy.
DETERMINISTIC_STRIP_WEIGHTS = 1 << 19

# The number of rows that a deterministic product computes together. A library's kernel computes some rows at a time,
# and those that are left over in another order of sums: MKL's for AVX2 take 6 rows, others 1, 2, 4, 8, 12, 16 or 24.
# All of these divide 48, so that no row of a tile is left over, and every row is summed like its neighbours.
TILE = 48

# The rows of a block of the order of codes that has the largest blocks.
ORDERED_ROWS = 64

# If bits must not depend on the number of rows, elementwise operations get a multiple of this number of rows. Torch
# computes functions such as exp for two registers at a time, up to 64 numbers, and uses another implementation for the
# remainder at the end of a tensor. With a multiple of 64 rows there is no remainder, whatever their width.
VECTOR_ROWS = 64


def whole_vectors(num_rows: int) -> int:
    """`num_rows` rounded up to a multiple of VECTOR_ROWS."""
    return -(-num_rows // VECTOR_ROWS) * VECTOR_ROWS


def row_nbytes(num_columns: int) -> int:
    """The scratch of one row of an input of a product with a matrix in order `tiles`.

    That is the row, in bfloat16, and a float32 sum for every chunk of its columns.
    """
    return 2 * num_columns + 4 * (num_columns // TILE_COLUMNS)


def fused_row_nbytes(
    dense: Sequence[tuple[int, int]], hidden: int, chosen: int = 1, inner: int = 0, num_experts: int = 0
) -> int:
    """The buffers of one row of a decoder layer that the library's steps compute: its vectors, its routing, and what
    products of its `dense` matrices [(rows, columns)] and of its `chosen` experts take; `inner` is 0 for experts that
    stream, which are computed in other memory."""
    widest, outputs = max(columns for _, columns in dense), chosen if inner or not num_experts else 0
    vectors = (3 + outputs) * hidden + widest + sum(rows for rows, _ in dense)
    products = 3 * row_nbytes(widest) + outputs * (row_nbytes(hidden) + row_nbytes(inner))
    # Ids, tokens and rows of the chosen experts in int64, their weights and all logits in float32.
    return 2 * vectors + products + 32 * chosen + 4 * num_experts


def strip_rows(layout: Layout, deterministic: bool) -> int:
    """The number of rows of a matrix [N, K] that are multiplied together: whole blocks, or all."""
    num_rows, num_columns = layout.shape
    block = layout.row_block
    weights = DETERMINISTIC_STRIP_WEIGHTS if deterministic else STRIP_WEIGHTS
    # Planned scratch is that of a format's own order: another order must not take more.
    several = max(block, ORDERED_ROWS) if block > 1 else 1
    return min(-(-num_rows // block) * block, max(1, weights // num_columns // several) * several)


def wide_columns(layout: Layout) -> int:
    """The float32 numbers of scratch that unpacking one row takes: for the nibbles of int4, or the scales of nf4."""
    return -(-layout.shape[1] // {"int4": 8, "nf4": layout.group}.get(layout.codes, 64))


def is_direct(layout: Layout, dtype: str) -> bool:
    """Whether products with activations of `dtype` read the matrix in place, without dequantizing it."""
    return layout.codes == "none" and layout.dtype == dtype


def scratch_planes(layout: Layout, dtype: str, deterministic: bool) -> tuple[Plane, ...]:
    """The scratch of one product: `weight` and `wide` (see Codec) for a strip, `x` and `y` for a tile.

    Planes that the product does not use have no rows.
    """
    rows, num_columns = strip_rows(layout, deterministic), layout.shape[1]
    widened = 0 if is_direct(layout, dtype) else rows
    tile = TILE if deterministic else 0
    return lay_out(
        [
            ("weight", dtype, (widened, num_columns)),
            ("wide", "float32", (widened, wide_columns(layout))),
            ("x", dtype, (tile, num_columns)),
            ("y", dtype, (tile, rows)),
        ]
    )


def scratch_nbytes(layout: Layout, dtype: str, deterministic: bool) -> int:
    """The bytes of a Workspace that products of activations of `dtype` with such a matrix need."""
    return end_of(scratch_planes(layout, dtype, deterministic))
