"""How much scratch a product with a packed matrix takes, and how the matrix is cut into strips to bound it.

Free of torch, as the planner counts these bytes. Knows sizes, not kernels.
"""

from .formats.format import Layout, Plane, end_of, lay_out

# Weights widened at a time: 8 MiB of bfloat16. Larger strips are not faster, and those of a language model's output
# head would be hundreds of MiB. A constant, not a share of a budget: the cut may show in a result's last bits.
STRIP_WEIGHTS = 1 << 22
# The same where a product is deterministic: threads share its strips, each of which one thread computes, so that how
# many threads there are shows in no bit. Small enough that a matrix of 2048 x 2048 occupies eight of them.
STEADY_WEIGHTS = 1 << 19

# Rows that a deterministic product computes together. Of 16, 32 and 64, 32 is the one that is never much slower than
# the other two: a single row costs 1.2 times an unpadded one in bfloat16, 64 rows 1.1 times (`bench.micro linear`).
TILE = 32

# Rows that elementwise operations see a multiple of where bits must not depend on how many there are. Torch computes
# functions such as exp for two registers at a time, up to 64 numbers, and for what is left over at a tensor's end with
# another implementation. With so many rows of any width nothing is left over.
VECTOR_ROWS = 64


def whole_vectors(num_rows: int) -> int:
    """`num_rows` and what they are padded with."""
    return -(-num_rows // VECTOR_ROWS) * VECTOR_ROWS


def strip_rows(layout: Layout, deterministic: bool) -> int:
    """Rows of a matrix [N, K] that are multiplied together: whole blocks, or all."""
    num_rows, num_columns = layout.shape
    block = layout.row_block
    weights = STEADY_WEIGHTS if deterministic else STRIP_WEIGHTS
    return min(-(-num_rows // block) * block, max(1, weights // num_columns // block) * block)


def wide_columns(layout: Layout) -> int:
    """Numbers of float32 scratch that unpacking one row takes: what int4 does with its nibbles, nf4 with its scales."""
    return -(-layout.shape[1] // (8 if layout.format == "int4" else 64))


def is_direct(layout: Layout, dtype: str) -> bool:
    """Whether products with activations of `dtype` read the matrix where it lies, and widen nothing."""
    return layout.format == "none" and layout.dtype == dtype


def scratch_planes(layout: Layout, dtype: str, deterministic: bool) -> tuple[Plane, ...]:
    """The scratch of one product: `weight` and its scales `wide` for a strip, `x` and `y` for a tile.

    Those that the product does not use have no rows.
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
    """Bytes of Workspace that products of activations of `dtype` with such a matrix need."""
    return end_of(scratch_planes(layout, dtype, deterministic))
