"""How close do looked-up rows of a table on the disk come to bare reads of as many blocks?

    python -m bench.micro table [--folder .] [--gib 2] [--row 280] [--rounds 5]

Writes a table of random bytes, then looks rows of it up at random past the page cache, as passes of some tokens with 16
rows each would, and none is kept. The floor: as many O_DIRECT reads, each of the blocks of one row, at random, by as
many threads as the product's readers have, without engine code. Both take their turn in every round. Prints reads a
second, the median of the rounds, and the ratio of each round's pair: median, smallest, largest.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from bench.subjects.reads import write_file
from moedge.offload.device import allocate
from moedge.offload.stream.reader_lane import NUM_THREADS
from moedge.offload.stream.rows import TablePart, TableReader
from moedge.offload.stream.stream import ALIGNMENT

TOKENS = (1, 16, 64, 334, 2048)
ROWS_PER_TOKEN = 16
# Of each measurement, so that a round of one token a pass takes as long as others.
READS = 16_384


def bare(path: Path, rows: np.ndarray, row_nbytes: int) -> float:
    """Seconds that reads of the blocks of these rows take."""
    firsts, lasts = (each // ALIGNMENT * ALIGNMENT for each in (rows * row_nbytes, (rows + 1) * row_nbytes - 1))
    reads = list(zip(firsts.tolist(), (lasts - firsts + ALIGNMENT).tolist(), strict=True))

    def read(index: int) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        memory = memoryview(allocate(-(-row_nbytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT))
        for begin, nbytes in reads[index::NUM_THREADS]:
            os.preadv(descriptor, [memory[:nbytes]], begin)
        os.close(descriptor)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(NUM_THREADS)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def looked_up(reader: TableReader, batches: list[np.ndarray]) -> tuple[float, int]:
    """Seconds for batches of rows, and the reads that they took."""
    before, begin = reader.counts.reads, time.perf_counter()
    for rows in batches:
        reader.read(rows, len(rows))
    return time.perf_counter() - begin, reader.counts.reads - before


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path("."))
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--row", type=int, default=280, help="bytes of a row")
    parser.add_argument("--rounds", type=int, default=5)


def run(options: argparse.Namespace) -> None:
    generator, nbytes = np.random.default_rng(0), int(options.gib * (1 << 30)) >> 24 << 24
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "table"
        write_file(path, nbytes)
        reader = TableReader([TablePart(path, 0, nbytes // options.row)], options.row)
        print(f"{nbytes / (1 << 30):.1f} GiB in rows of {options.row} bytes, {NUM_THREADS} threads")
        for tokens in TOKENS:
            rates: list[tuple[float, float]] = []
            for _ in range(options.rounds):
                count = tokens * ROWS_PER_TOKEN
                batches = [np.unique(generator.integers(0, len(reader), count)) for _ in range(-(-READS // count))]
                ours, reads = looked_up(reader, batches)
                floor = bare(path, generator.integers(0, len(reader), reads), options.row)
                rates.append((reads / ours, reads / floor))
            ratios = [ours / floor for ours, floor in rates]
            ours, floor = (statistics.median(each) for each in zip(*rates, strict=True))
            print(
                f"{tokens:5} tokens a pass: {ours:8,.0f} reads/s, bare {floor:8,.0f}; "
                f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        reader.close()
