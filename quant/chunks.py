"""How the rows of a matrix are cut for packing. Knows no format and no tensor."""

from collections.abc import Iterator

# Below this torch runs an operation in the calling thread, and a core's cache holds the chunk's float32 copies.
# Packing takes forty operations per chunk: were they shared among threads, each would end in a barrier, and one busy
# neighbour on the machine would then slow packing down ten to a hundred times (bench/pack.py).
CHUNK = 1 << 15


def row_chunks(shape: tuple[int, int], row_block: int = 1) -> Iterator[slice]:
    """Runs of whole blocks of rows of a matrix [N, K], of fewer than CHUNK numbers each where a block allows."""
    num_rows, num_columns = shape
    rows = max(1, (CHUNK - 1) // num_columns // row_block) * row_block
    return (slice(start, start + rows) for start in range(0, num_rows, rows))
