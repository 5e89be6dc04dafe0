"""Reads of files that were there before (`offload/machine/speeds.py`): each block once, as the way says, and only where
they are large enough.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from moedge.offload.machine import speeds as cold_reads
from moedge.offload.machine.profile import Disk, DiskRead
from moedge.offload.machine.speeds import large_files, measure_cold_reads

MIB = 1 << 20
WAY = DiskRead(MIB, 3, 1e9, True)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name / "layer.safetensors" for name in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        path.write_bytes(bytes(4 * MIB + 100))
    return paths


def test_every_whole_block_of_every_file_is_read_once(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []
    read = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        seen.append((os.readlink(f"/proc/self/fd/{descriptor}"), offset))
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(cold_reads.os, "preadv", preadv)
    before = len(os.listdir("/proc/self/fd"))
    rate = measure_cold_reads(files, WAY, seconds=30)
    assert rate is not None
    assert rate > 0
    assert sorted(seen) == sorted((str(path), index * MIB) for path in files for index in range(4))
    assert len(os.listdir("/proc/self/fd")) == before


def test_little_is_no_measure(files: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cold_reads, "SMALLEST_FILE", MIB)
    assert large_files(tmp_path) == []
    monkeypatch.setattr(cold_reads, "LEAST_NBYTES", 8 * MIB)
    assert sorted(large_files(tmp_path)) == files
    assert measure_cold_reads([], WAY) is None


def test_a_disk_that_fails_gives_no_rate(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(cold_reads.os, "preadv", broken)
    assert measure_cold_reads(files, WAY) is None


def test_plans_take_the_slower_of_a_new_file_and_of_old_ones() -> None:
    reads = (DiskRead(MIB, 1, 3e9),)
    assert Disk(True, MIB, reads).bytes_s == 3e9
    assert Disk(True, MIB, reads, 2e9).bytes_s == 2e9
    assert Disk(True, MIB, reads, 4e9).bytes_s == 3e9
