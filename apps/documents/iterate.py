"""`iter_documents`: the files of a folder as documents, read beside each other in limited processes."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from hashlib import sha256
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import BinaryIO

from .document import Document, UnreadDocument
from .file_walk import FoundFile, find_files
from .reader_process import ReaderProcess, ReadOptions
from .readers.content import Content, ReadCode, ReadFailure
from .text_cache import TextCache

_PIECE_NBYTES = 1 << 20
DEFAULTS = ReadOptions()


def iter_documents(
    folder: str | os.PathLike[str],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    options: ReadOptions = DEFAULTS,
    cache: str | os.PathLike[str] | None = None,
    workers: int | None = None,
) -> Iterator[Document | UnreadDocument]:
    """Reads every file of a folder that is not skipped (see `find_files`), in the order of their paths.

    A file that cannot be read gives an UnreadDocument, never an exception: parsers run in `workers` processes (by
    default one for each processor, four at most), which are killed at the limits of `options`. `cache` is a folder in
    which texts are kept by the hash of the file. A few documents are in memory at a time.

    Raises InputUnreadable for a folder that cannot be listed, SettingError for a reader that cannot be imported.
    """
    files = find_files(folder, include=include, exclude=exclude)
    yield from read_files(Path(folder), (each for each in files if each.skipped is None), options, cache, workers)


def read_files(
    folder: Path,
    files: Iterable[FoundFile],
    options: ReadOptions,
    cache: str | os.PathLike[str] | None = None,
    workers: int | None = None,
) -> Iterator[Document | UnreadDocument]:
    """The same for files that were found before."""
    with _readers(folder, options, cache, workers) as (submit, ahead):
        waiting: deque[Future[Document | UnreadDocument]] = deque()
        for found in files:
            waiting.append(submit(found))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def read_as_completed(
    folder: Path,
    files: Iterable[tuple[int, FoundFile]],
    options: ReadOptions,
    cache: str | os.PathLike[str] | None,
    workers: int | None,
    stop: Event,
) -> Iterator[tuple[int, Document | UnreadDocument]]:
    """The same for numbered files, each as soon as it is read: a slow one delays no other. Ends once `stop` is set."""
    with _readers(folder, options, cache, workers) as (submit, ahead):
        left = iter(files)
        waiting = {submit(found): number for number, found in islice(left, ahead)}
        while waiting and not stop.is_set():
            for future in wait(waiting, _POLL_SECONDS, FIRST_COMPLETED).done:
                yield waiting.pop(future), future.result()
                waiting |= {submit(found): number for number, found in islice(left, 1)}


# How soon a stop is noticed while every reader is busy.
_POLL_SECONDS = 0.1

Submit = Callable[[FoundFile], Future[Document | UnreadDocument]]


@contextmanager
def _readers(
    folder: Path, options: ReadOptions, cache: str | os.PathLike[str] | None, workers: int | None
) -> Iterator[tuple[Submit, int]]:
    """(starts to read a file, how many files may wait for whoever takes them); ends what is still being read."""
    count = workers or min(4, os.cpu_count() or 1)
    kept = None if cache is None else TextCache(Path(cache), options)
    processes: SimpleQueue[ReaderProcess] = SimpleQueue()
    every = [ReaderProcess(options) for _ in range(count)]
    for process in every:
        processes.put(process)

    def read(found: FoundFile) -> Document | UnreadDocument:
        process = processes.get()
        try:
            return _read(folder, found, process, kept, options)
        finally:
            processes.put(process)

    pool = ThreadPoolExecutor(count, thread_name_prefix="documents")
    try:
        yield lambda found: pool.submit(read, found), 2 * count
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        # Whoever waits for one of them sees its end.
        for process in every:
            process.close()
        pool.shutdown()


def _read(
    folder: Path, found: FoundFile, process: ReaderProcess, cache: TextCache | None, options: ReadOptions
) -> Document | UnreadDocument:
    digest = ""
    try:
        with _opened(folder / found.path) as file:
            digest, nbytes = _digest(file, options.limits.file_nbytes)
            content = None if cache is None else cache.get(digest, found.path)
            if content is None:
                file.seek(0)
                content = _content(process, file, nbytes, found, digest, cache)
        return Document.of(found.name, digest, content)
    except ReadFailure as failure:
        return UnreadDocument(found.name, digest, failure.code, failure.message)
    except OSError as error:
        return UnreadDocument(found.name, digest, ReadCode.UNREADABLE, f"it cannot be read: {error.strerror}")


def _content(
    process: ReaderProcess, file: BinaryIO, nbytes: int, found: FoundFile, digest: str, cache: TextCache | None
) -> Content:
    try:
        content = process.read(file, nbytes, found.name, digest)
    except ReadFailure as failure:
        if cache is not None:
            cache.keep(digest, found.path, failure)
        raise
    if cache is not None:
        cache.keep(digest, found.path, content)
    return content


def _opened(path: Path) -> BinaryIO:
    """A regular file: what was one when the folder was listed may be a pipe by now, which would never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ReadFailure(ReadCode.UNREADABLE, "it is not a regular file any more")
    return os.fdopen(descriptor, "rb")


def _digest(file: BinaryIO, most: int) -> tuple[str, int]:
    """(sha256, bytes). Raises ReadFailure for a file with more than `most` bytes."""
    hashed, nbytes = sha256(), 0
    while data := file.read(_PIECE_NBYTES):
        hashed.update(data)
        nbytes += len(data)
        if nbytes > most:
            raise ReadFailure(ReadCode.TOO_LARGE, f"it has more than {most:,} bytes; split it, or leave it out")
    return hashed.hexdigest(), nbytes
