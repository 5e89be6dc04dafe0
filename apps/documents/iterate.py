"""`iter_documents`: the files of a folder as documents, in a stable order, read beside each other in limited processes.

What is skipped has its reason; what was read is kept by the hash of a file's bytes, so that the next question reads
nothing again.
"""

import json
import os
import re
import stat
import threading
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from hashlib import blake2b
from itertools import islice
from pathlib import Path, PurePath
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any, BinaryIO, overload

from ...face import errors, own_name
from .document import Document, UnreadDocument
from .reader_process import ReaderProcess, ReadOptions
from .readers.content import Content, ReadCode, ReadFailure
from .unpacking import Unpacked, file_digest, is_container, opened_document, shown


class Skipped(StrEnum):
    """Why a file is not read."""

    HIDDEN = "hidden"
    NOT_INCLUDED = "not included"
    EXCLUDED = "excluded"
    LINK_OUTSIDE = "link out of the folder"
    LINK_TO_FOLDER = "link to a folder"
    BROKEN_LINK = "broken link"
    NOT_A_FILE = "not a regular file"
    UNREADABLE_FOLDER = "unreadable folder"
    OF_A_JOB = "of a job"


@dataclass(frozen=True, slots=True)
class FoundFile:
    """`path` is relative to the folder, with `/`. `skipped` says why it is not read; None for a file that is."""

    path: str
    skipped: Skipped | None = None
    nbytes: int = 0

    @property
    def name(self) -> str:
        """The path as text that UTF-8 can hold: other bytes become `\\xNN`."""
        return shown(self.path)


class FoundFiles(Sequence[FoundFile]):
    """Files that are read, in their order: of each the bytes of its path and 16 more, where an object takes 200."""

    def __init__(self) -> None:
        self._paths = bytearray()
        self._ends = array("Q")
        self._nbytes = array("Q")

    def append(self, found: FoundFile) -> None:
        self._paths += os.fsencode(found.path)
        self._ends.append(len(self._paths))
        self._nbytes.append(found.nbytes)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> FoundFile: ...

    @overload
    def __getitem__(self, index: slice) -> list[FoundFile]: ...

    def __getitem__(self, index: int | slice) -> FoundFile | list[FoundFile]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        end = self._ends[index]
        begin = self._ends[index % len(self) - 1] if index % len(self) else 0
        return FoundFile(os.fsdecode(bytes(self._paths[begin:end])), None, self._nbytes[index])


def find_files(
    folder: str | os.PathLike[str],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    unpacked: Unpacked | None = None,
) -> Iterator[FoundFile]:
    """Every file below `folder` exactly once, skipped ones too; the content of hidden folders counts as hidden. Where
    `folder` is a file, it is the only one.

    With `unpacked`, what lies in an archive, a mailbox or a mail comes behind it, and an archive gives way to it.
    `include` and `exclude` are globs of the whole path (`invoices/*.pdf`) or, without a slash, of the name (`*.pdf`);
    a `*` also matches slashes, and one that matches a container matches all that lies in it. Raises InputUnreadable
    for a folder that is not there or cannot be listed.
    """
    root = Path(folder)
    if not root.exists():
        raise errors.InputUnreadable(f"{root} does not exist; give a folder of documents, or one document")
    alone = (FoundFile(root.name, None, root.stat().st_size),)
    for found in _walk(root, os.path.realpath(root), "", include, exclude) if root.is_dir() else alone:
        if unpacked is None or found.skipped not in (None, Skipped.NOT_INCLUDED) or not is_container(found.path):
            yield found
            continue
        for each in unpacked.members(found.path):
            yield FoundFile(each.path, _left_out(each.path, len(found.path), include, exclude), each.nbytes)


def folder_of(documents: str | os.PathLike[str]) -> Path:
    """The folder that the paths of documents begin in: `documents`, or where the one file lies that it is."""
    found = Path(documents)
    return found if found.is_dir() else found.parent


def _left_out(path: str, start: int, include: Sequence[str], exclude: Sequence[str]) -> Skipped | None:
    """Why a file is not read by its path, whose containers are all that begin it from `start` on."""
    inside = path[start:].split("/")[1:]
    ways = [path[: len(path) - len("/".join(["", *inside[number:]]))] for number in range(len(inside))] + [path]
    if include and not any(_matches(way, glob) for way in ways for glob in include):
        return Skipped.NOT_INCLUDED
    if any(_matches(way, glob) for way in ways for glob in exclude):
        return Skipped.EXCLUDED
    return Skipped.HIDDEN if any(part.startswith(".") for part in inside) else None


def _walk(
    root: Path, real_root: str, below: str, include: Sequence[str], exclude: Sequence[str]
) -> Iterator[FoundFile]:
    try:
        entries = sorted(os.scandir(root / below), key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        if not below:
            raise errors.InputUnreadable(f"{root} cannot be listed: {error.strerror}") from None
        yield FoundFile(below, Skipped.UNREADABLE_FOLDER)
        return
    jobs = {entry.name for entry in entries if entry.name.endswith(".job") and entry.is_dir(follow_symlinks=False)}
    for entry in entries:
        path = f"{below}/{entry.name}" if below else entry.name
        if entry.name.startswith("."):
            yield FoundFile(path, Skipped.HIDDEN)
        elif entry.name in jobs or _job_of(entry.name) in jobs:
            yield FoundFile(path, Skipped.OF_A_JOB)
        elif entry.is_dir(follow_symlinks=False):
            yield from _walk(root, real_root, path, include, exclude)
        else:
            yield _found(entry, path, real_root, include, exclude)


def _job_of(output: str) -> str | None:
    """The name of the folder of the job that has an output of this name; None where no output has it."""
    stem, suffix = os.path.splitext(output)
    return f"{_BESIDE.sub('', stem)}.job" if suffix in (".jsonl", ".csv", ".xlsx", ".parquet") else None


_BESIDE = re.compile(r"\.(errors|partial)$")


def _found(
    entry: os.DirEntry[str], path: str, real_root: str, include: Sequence[str], exclude: Sequence[str]
) -> FoundFile:
    left_out = _left_out(path, len(path), include, exclude)
    if left_out is not None and not (left_out is Skipped.NOT_INCLUDED and is_container(path)):
        return FoundFile(path, left_out)
    try:
        status = entry.stat()
    except OSError:
        return FoundFile(path, Skipped.BROKEN_LINK)
    if entry.is_symlink():
        target = os.path.realpath(entry.path)
        if os.path.commonpath([target, real_root]) != real_root:
            return FoundFile(path, Skipped.LINK_OUTSIDE)
        if stat.S_ISDIR(status.st_mode):
            return FoundFile(path, Skipped.LINK_TO_FOLDER)
    if not stat.S_ISREG(status.st_mode):
        return FoundFile(path, Skipped.NOT_A_FILE)
    return FoundFile(path, left_out, status.st_size)


def _matches(path: str, glob: str) -> bool:
    return fnmatchcase(path if "/" in glob else path.rpartition("/")[2], glob)


# To be raised when readers change what they make of the same bytes.
_VERSION = 1


class TextCache:
    """Files `ab/abcdef...json` in a folder. An entry that is damaged or torn is as if it were not there."""

    def __init__(self, folder: Path, options: ReadOptions) -> None:
        self._folder = folder
        self._options = f"{_VERSION}:{options.reader}:{options.languages}"

    def get(self, digest: str, name: str) -> Content | None:
        """The text of a file with this sha256 and name. Raises ReadFailure where it is known to have none."""
        try:
            checksum, _, body = self._path(digest, name).read_bytes().partition(b" ")
            if int(checksum, 16) != zlib.crc32(body):
                return None
            found = json.loads(body)
        except (OSError, ValueError):
            return None
        if "code" in found:
            raise ReadFailure(ReadCode(found["code"]), found["message"])
        return Content(**{**found, "pages": tuple(found["pages"]), "notes": tuple(found["notes"])})

    def keep(self, digest: str, name: str, found: Content | ReadFailure) -> None:
        """Keeps a text, or a failure that would be the same again. A full disk keeps nothing."""
        if isinstance(found, ReadFailure):
            if not found.code.permanent:
                return
            entry: dict[str, Any] = {"code": found.code, "message": found.message}
        else:
            entry = asdict(found)
        body = json.dumps(entry, separators=(",", ":")).encode()
        path = self._path(digest, name)
        # Two threads may read two files of the same content.
        hidden = own_name(path.with_name(f"{path.name}.{threading.get_ident()}"))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not synced: a checksum tells what a power cut left behind, and reading the file again costs little.
            hidden.write_bytes(b"%08x " % zlib.crc32(body) + body)
            os.replace(hidden, path)
        except OSError:
            with suppress(OSError):
                hidden.unlink(missing_ok=True)

    def _path(self, digest: str, name: str) -> Path:
        """The type of a text depends on the name's suffix, too."""
        key = f"{self._options}:{PurePath(name).suffix.lower()}".encode()
        return self._folder / digest[:2] / f"{digest}-{blake2b(key, digest_size=4).hexdigest()}.json"


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
    """Reads every file of a folder that is not skipped (see `find_files`), in the order of their paths, or one file.

    A file that cannot be read gives an UnreadDocument, never an exception: parsers run in `workers` processes (by
    default one for each processor, four at most), which are killed at the limits of `options`. `cache` is a folder in
    which texts are kept by the hash of the file. A few documents are in memory at a time.

    Raises InputUnreadable for a folder that cannot be listed, SettingError for a reader that cannot be imported.
    """
    with (
        TemporaryDirectory(prefix="moedge-") as spool,
        closing(Unpacked(folder_of(folder), Path(spool), options)) as unpacked,
    ):
        files = find_files(folder, include=include, exclude=exclude, unpacked=unpacked)
        with _readers(folder_of(folder), Path(spool), options, cache, workers) as (submit, ahead):
            waiting: deque[Future[Document | UnreadDocument]] = deque()
            for found in files:
                if found.skipped is None:
                    waiting.append(submit(found))
                if len(waiting) >= ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()


def read_as_completed(
    folder: Path,
    spool: Path,
    files: Iterable[tuple[int, FoundFile]],
    options: ReadOptions,
    cache: str | os.PathLike[str] | None,
    workers: int | None,
    stop: Event,
) -> Iterator[tuple[int, Document | UnreadDocument]]:
    """The same for numbered files that were found before, with what containers hold in `spool`; each as soon as it is
    read: a slow one delays no other. Ends once `stop` is set."""
    with _readers(folder, spool, options, cache, workers) as (submit, ahead):
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
    folder: Path, spool: Path, options: ReadOptions, cache: str | os.PathLike[str] | None, workers: int | None
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
            return _read(folder, spool, found, process, kept, options)
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
    folder: Path, spool: Path, found: FoundFile, process: ReaderProcess, cache: TextCache | None, options: ReadOptions
) -> Document | UnreadDocument:
    digest = ""
    try:
        with opened_document(folder, found.path, spool) as file:
            digest, nbytes = file_digest(file, options.limits.file_nbytes)
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
