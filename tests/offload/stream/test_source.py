"""Sources (`offload/stream/reader_lane.py`) bring exactly the bytes that were asked for, past the page cache if
possible, and notice a changed file.
"""

import errno
import mmap
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from moedge.offload.stream.reader_lane import DirectFile, HostBytes
from moedge.offload.stream.stream import ALIGNMENT

CONTENT = random.Random(0).randbytes(5 * ALIGNMENT + 100)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(params=[True, False], ids=["direct", "cached"])
def file(path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DirectFile:
    """Both ways of reading, whatever the file system of the temporary folder can do."""
    if not request.param:
        monkeypatch.setattr(os, "O_DIRECT", 0)
    file = DirectFile(path)
    if request.param and not file.direct:
        pytest.skip("this file system reads only through the page cache")
    file.direct = request.param
    return file


def buffer(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 1), (0, ALIGNMENT), (ALIGNMENT, 2 * ALIGNMENT + 7), (4 * ALIGNMENT, ALIGNMENT + 100)]
)
def test_the_bytes_asked_for_arrive(file: DirectFile, offset: int, nbytes: int) -> None:
    target = buffer(8 * ALIGNMENT)
    file.read(target, offset, nbytes)
    assert target[:nbytes] == CONTENT[offset : offset + nbytes]
    assert not any(target[-(-nbytes // ALIGNMENT) * ALIGNMENT :]), "nothing beyond the last page was touched"


@pytest.mark.parametrize("most", [1, ALIGNMENT, ALIGNMENT + 1, 2 * ALIGNMENT])
def test_short_reads_go_on_where_they_stopped(file: DirectFile, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, starts = os.preadv, []

    def read(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        starts.append(offset)
        # A direct read gives whole blocks at least.
        return min(max(most, ALIGNMENT if file.direct else 1), preadv(descriptor, buffers, offset))

    monkeypatch.setattr(os, "preadv", read)
    target = buffer(8 * ALIGNMENT)
    file.read(target, 0, 3 * ALIGNMENT + 50)
    assert target[: 3 * ALIGNMENT + 50] == CONTENT[: 3 * ALIGNMENT + 50]
    assert len(starts) > 1
    assert not file.direct or not any(start % ALIGNMENT for start in starts), "the kernel refuses such a start"


@pytest.mark.parametrize("size", [0, ALIGNMENT, 2 * ALIGNMENT + 5])
def test_a_file_cut_while_it_is_read_is_an_error_not_a_signal(file: DirectFile, size: int, path: Path) -> None:
    os.truncate(path, size)
    with pytest.raises(OSError, match=r"ends at byte|changed"):
        file.read(buffer(8 * ALIGNMENT), ALIGNMENT, 3 * ALIGNMENT)


@pytest.mark.parametrize("grow", [True, False])
def test_a_file_edited_while_it_is_read_is_an_error(file: DirectFile, grow: bool, path: Path) -> None:
    with path.open("ab" if grow else "r+b") as other:
        other.write(b"x")
    os.utime(path, ns=(1, 1))
    with pytest.raises(OSError, match="changed") as caught:
        file.read(buffer(8 * ALIGNMENT), 0, ALIGNMENT)
    assert caught.value.errno == errno.ESTALE


def test_a_file_renamed_or_removed_meanwhile_is_read_on(file: DirectFile, path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.write_bytes(b"another")
    path.with_name("elsewhere").unlink()
    target = buffer(8 * ALIGNMENT)
    file.read(target, 0, len(CONTENT))
    assert target[: len(CONTENT)] == CONTENT


@pytest.mark.parametrize("refused", ["open", "read"])
def test_a_file_system_that_refuses_direct_reads_is_read_through_the_cache(
    refused: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file, preadv = os.open, os.preadv
    direct: set[int] = set()

    def open_(name: Path, flags: int) -> int:
        if flags & os.O_DIRECT and refused == "open":
            raise OSError(errno.EINVAL, "no direct reads here")
        descriptor = open_file(name, flags & ~os.O_DIRECT)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        else:
            direct.discard(descriptor)
        return descriptor

    def read(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, "no direct reads here")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", read)
    file = DirectFile(path)
    assert not file.direct
    target = buffer(ALIGNMENT)
    file.read(target, 0, 50)
    assert target[:50] == CONTENT[:50]
    file.close()


@pytest.mark.parametrize("fails", ["open", "read"])
def test_any_other_error_on_opening_is_told(fails: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(os, {"open": "open", "read": "preadv"}[fails], fail)
    with pytest.raises(OSError, match="bad sector"):
        DirectFile(path)


def test_host_bytes_are_copied() -> None:
    target = buffer(2 * ALIGNMENT)
    HostBytes(memoryview(CONTENT)).read(target, ALIGNMENT, ALIGNMENT + 9)
    assert target[: ALIGNMENT + 9] == CONTENT[ALIGNMENT : 2 * ALIGNMENT + 9]
    assert not any(target[ALIGNMENT + 9 :])
