"""Rows of matrices that stay in files (`offload/stream/rows.py`) are those of the files, however they are read."""

import os
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moedge.offload.stream import rows as rows_module
from moedge.offload.stream.reader_lane import BUFFER_NBYTES, NUM_THREADS, DirectFile
from moedge.offload.stream.rows import LARGEST_ROW, TablePart, TableReader, _turns
from moedge.offload.stream.stream import ALIGNMENT, StreamBroken

# Rows as long as those of published tables, and odd ones: longer than a block, and of one byte.
SIZES = (280, 1, 24, 4096, 6007, 33_000)


class Table:
    """A matrix [rows, row_nbytes] in three pieces of two files, whose bytes lie anywhere."""

    def __init__(self, folder: Path, rows: int, row_nbytes: int) -> None:
        generator = np.random.default_rng(row_nbytes)
        self.data = generator.integers(0, 256, (rows, row_nbytes), dtype=np.uint8)
        cuts = (0, rows // 3, rows // 3 + 1, rows)
        pieces = [self.data[a:b].tobytes() for a, b in pairwise(cuts)]
        first, second = folder / "first", folder / "second"
        first.write_bytes(bytes(77) + pieces[0] + bytes(4099) + pieces[2])
        second.write_bytes(bytes(1) + pieces[1])
        offsets = (77, 1, 77 + len(pieces[0]) + 4099)
        self.parts = [
            TablePart(path, offset, b - a)
            for path, offset, (a, b) in zip((first, second, first), offsets, pairwise(cuts), strict=True)
        ]

    def reader(self, kept_nbytes: int = 0) -> TableReader:
        return TableReader(self.parts, self.data.shape[1], kept_nbytes)


def batches(rows: int) -> Iterator[NDArray[np.int64]]:
    generator = np.random.default_rng(5)
    yield np.array([], np.int64)
    yield np.arange(rows)
    yield from (np.array([each]) for each in (0, rows // 3 - 1, rows // 3, rows // 3 + 1, rows - 1))
    yield from (np.unique(generator.integers(0, rows, count)) for count in (2, 17, 900))
    # Again and again the same ones, and others between them.
    yield from (np.unique(generator.integers(0, rows // 9, 50)) for _ in range(9))


@pytest.mark.parametrize("kept_nbytes", [0, 3000, 1 << 20])
@pytest.mark.parametrize("row_nbytes", SIZES)
def test_rows_are_those_of_the_files(row_nbytes: int, kept_nbytes: int, tmp_path: Path) -> None:
    table = Table(tmp_path, 40_001 if row_nbytes < 300 else 401, row_nbytes)
    with closing(table.reader(kept_nbytes)) as reader:
        wanted = 0
        for batch in batches(len(reader)):
            assert np.array_equal(reader.read(batch, 2 * len(batch)), table.data[batch])
            wanted += len(batch)
        counts = reader.counts
        assert (counts.rows, counts.looked_up) == (wanted, 2 * wanted * row_nbytes)
        assert (counts.kept > 0) == (kept_nbytes >= row_nbytes)
        assert counts.nbytes % ALIGNMENT == 0


def test_files_that_cannot_be_read_directly_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moedge.offload.stream.reader_lane._open", lambda path: (os.open(path, os.O_RDONLY), False))
    table = Table(tmp_path, 5003, 280)
    with closing(table.reader()) as reader:
        for batch in batches(len(reader)):
            assert np.array_equal(reader.read(batch, 0), table.data[batch])


def test_neighbours_are_one_read_and_others_whole_blocks(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_bytes(bytes(64 * ALIGNMENT))
    with closing(TableReader([TablePart(path, 0, 64 * 16)], ALIGNMENT // 16)) as reader:
        for rows, reads, blocks in [
            ([0, 1, 15], 1, 1),
            ([0, 16], 1, 2),
            ([0, 32], 2, 2),
            ([0, 48, 49, 63, 64, 1023], 3, 4),
            (list(range(1024)), 1, 64),
        ]:
            reader.counts = rows_module.RowCounts()
            reader.read(np.array(rows), 0)
            assert (reader.counts.reads, reader.counts.nbytes) == (reads, blocks * ALIGNMENT), rows


def test_turns_share_all_ranges_and_fit_a_buffer() -> None:
    for count, size in [(1, 4096), (16, 4096), (5000, 8192), (37, BUFFER_NBYTES // 4 + LARGEST_ROW)]:
        sizes = np.full(count, size)
        turns = list(_turns(sizes))
        assert [each for a, b in turns for each in range(a, b)] == list(range(count))
        assert all(sizes[a:b].sum() <= BUFFER_NBYTES for a, b in turns)
        assert len(turns) >= min(count, NUM_THREADS)


def test_popular_rows_stay_where_others_come_once(tmp_path: Path) -> None:
    table, generator = Table(tmp_path, 40_001, 24), np.random.default_rng(3)
    popular = np.arange(0, 40_000, 800)
    with closing(table.reader(200 * 24)) as reader:
        for _ in range(60):
            others = generator.integers(0, 40_001, 40)
            reader.read(np.unique(np.concatenate([popular, others])), 0)
        assert reader.counts.kept > 0.5 * 60 * len(popular)


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    table = Table(tmp_path, 4003, 24)
    with closing(table.reader()) as reader:
        with (tmp_path / "first").open("r+b") as file:
            file.truncate(5000)
        with pytest.raises(StreamBroken, match="could not be read"):
            reader.read(np.array([0, 4000]), 0)


def test_what_no_buffer_holds_is_refused(tmp_path: Path) -> None:
    table = Table(tmp_path, 5, 24)
    with closing(table.reader()) as reader, pytest.raises(IndexError, match=r"rows from -1 to 3 .* wanted 0 to 4"):
        reader.read(np.array([-1, 3]), 0)
    with pytest.raises(ValueError, match="wanted 1 to"):
        TableReader(table.parts, LARGEST_ROW + 1)


def test_a_row_off_by_one_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    table, fetch = Table(tmp_path, 4003, 280), DirectFile.fetch
    monkeypatch.setattr(DirectFile, "fetch", lambda self, target, at, size: fetch(self, target, at + ALIGNMENT, size))
    rows = np.array([3, 100])
    with closing(table.reader()) as reader:
        assert not np.array_equal(reader.read(rows, 0), table.data[rows])
