"""The page cache: how much of a file is in it, and how to get a file out of it.

A page is charged to the memory group that brought it in. What lies in the cache beforehand costs a group nothing, so a
ceiling binds a reader of files, through mmap above all, only where its files were dropped first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

# A private mapping of a whole file can be more than the machine promises; pieces of it never are.
WINDOW = 1 << 30
ATTEMPTS = 5
READ_NBYTES = 8 << 20


class StillCached(Exception):
    """A file was dropped from the page cache and is still in it."""


def files_in(paths: Iterable[Path]) -> list[Path]:
    """The files among `paths` and below the folders among them, each once, symbolic links followed."""
    found = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    return sorted({file.resolve() for file in found if file.is_file()})


def nbytes(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def resident_nbytes(files: Iterable[Path]) -> int:
    """Bytes of `files` that lie in the page cache, in whole pages.

    The kernel answers only who may write a file; for others it calls every page resident.
    """
    return sum(_resident_pages(file) for file in files) * mmap.PAGESIZE


def _resident_pages(file: Path) -> int:
    size, pages = file.stat().st_size, 0
    with file.open("rb") as opened:
        for offset in range(0, size, WINDOW):
            pages += _window_pages(opened.fileno(), offset, min(WINDOW, size - offset))
    return pages


def _window_pages(descriptor: int, offset: int, length: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    answers = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
    with mmap.mmap(descriptor, length, offset=offset, access=mmap.ACCESS_COPY) as window:
        start = ctypes.c_char.from_buffer(window)
        try:
            address = ctypes.c_void_p(ctypes.addressof(start))
            if libc.mincore(address, ctypes.c_size_t(length), answers):
                raise OSError(ctypes.get_errno(), "mincore failed")
        finally:
            # A mapping that is still exported cannot be closed.
            del start
    return sum(answer & 1 for answer in answers.raw)


def read(files: Iterable[Path]) -> None:
    """Gets `files` into the page cache, as far as memory goes."""
    buffer = bytearray(READ_NBYTES)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def drop(files: Iterable[Path]) -> None:
    """Gets `files` out of the page cache and looks whether they are gone. Raises StillCached."""
    for file in files:
        for _ in range(ATTEMPTS):
            _drop(file)
            left = resident_nbytes([file])
            if not left:
                break
            time.sleep(0.2)
        else:
            raise StillCached(
                f"{left / 1e6:.1f} MB of {file} stay in the page cache, and a ceiling would not count them; "
                "end the process that maps the file, or put it on a disk if its file system is memory (tmpfs)"
            )


def _drop(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        # Pages that are not written yet cannot be dropped.
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
