"""The pieces in which matrices are packed and dequantized on one thread."""

from collections.abc import Iterator

from torch import Tensor

# Below this size torch runs an operation on the calling thread, and a core's cache holds the chunk's float32 copies.
CHUNK = 1 << 15
# The chunk of packing, which computes every chunk on one thread (tensor.pack_into): in smaller ones the calls of twenty
# operations take longer than what they compute, larger ones leave the second cache. If threads shared the operations,
# each would end in a barrier, and another busy process would make packing ten to a hundred times slower.
PACK_CHUNK = 1 << 17
# On other devices an operation costs a launch, and copies are memory that no plan counts.
DEVICE_CHUNK = 1 << 20


def row_chunks(shape: tuple[int, int], row_block: int = 1, chunk: int | None = None) -> Iterator[slice]:
    """Slices of whole blocks of rows of a matrix [N, K], each of fewer than `chunk` numbers, or CHUNK.

    A block that has more is a slice of its own.
    """
    num_rows, num_columns = shape
    rows = max(1, ((chunk or CHUNK) - 1) // num_columns // row_block) * row_block
    return (slice(start, start + rows) for start in range(0, num_rows, rows))


def chunks_of(matrix: Tensor) -> Iterator[slice]:
    """Slices of the rows of a matrix [N, K] that are dequantized together, with a few float32 copies of each."""
    if matrix.is_cpu:
        return row_chunks((len(matrix), matrix.shape[1]))
    rows = max(1, DEVICE_CHUNK // matrix.shape[1])
    return (slice(start, start + rows) for start in range(0, len(matrix), rows))
