"""What lies in archives, mailboxes and mails: the reading process unpacks it into files of the job, so that a member is
read as any file of the folder is."""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, BinaryIO

from ...face import write_atomically
from .reader_process import ReaderProcess, ReadOptions
from .readers.containers import ARCHIVES, MAILS
from .readers.content import ReadCode, ReadFailure, clean

# Of one file of the folder, with all that lies in what lies in it.
MAX_DEPTH, MAX_MEMBERS, MAX_NBYTES = 3, 10_000, 1 << 30
# A subject of a mail, which names it, may have any number of characters.
_LONGEST_NAME = 200
_PIECE_NBYTES = 1 << 20
# Stands for the attachments of a mail that could not be opened.
_UNKNOWN = "attachments"


def is_container(path: str) -> bool:
    return PurePath(path).suffix.lower() in (*ARCHIVES, *MAILS)


def is_document(path: str) -> bool:
    """Whether a file is one itself beside what lies in it: a mail is, and an archive is not."""
    return PurePath(path).suffix.lower() not in ARCHIVES


@dataclass(frozen=True, slots=True)
class Member:
    """`path` is that of its container and, behind a slash, the one below it."""

    path: str
    nbytes: int


class Unpacked:
    """The members of the containers in `folder`, each in a file of `spool` that its path names.

    An index for each container has the hash of its bytes: what did not change is not unpacked again.
    """

    def __init__(self, folder: Path, spool: Path, options: ReadOptions) -> None:
        self._folder = folder
        self._spool = spool
        self._options = options
        self._process = ReaderProcess(options)
        self._members = self._nbytes = 0

    def close(self) -> None:
        """Ends the process; the files stay."""
        self._process.close()

    def members(self, path: str) -> tuple[Member, ...]:
        """The documents in a container of the folder, in its order, itself among them where it is one, or where not
        all that lies in it could be unpacked: reading it says why. A mail that can be read a moment later has a member
        that cannot: what else lies in it is not known. Raises OSError where the disk is full."""
        self._members = self._nbytes = 0
        try:
            file = opened(self._folder / path)
        except (ReadFailure, OSError) as error:
            return _unopened(path, error)
        with file:
            try:
                digest, nbytes = file_digest(file, self._options.limits.file_nbytes)
            except (ReadFailure, OSError) as error:
                return _unopened(path, error, os.fstat(file.fileno()).st_size)
            index = _place(self._spool, path).with_suffix(".json")
            found = self._known(path, index, digest)
            if found is None:
                self._spool.mkdir(parents=True, exist_ok=True)
                found = tuple(self._unpack(Member(path, nbytes), file, digest, 1))
                entry = {"sha256": digest, "members": [[each.path, each.nbytes] for each in found]}
                write_atomically(index, json.dumps(entry).encode())
        return found

    def _known(self, path: str, index: Path, digest: str) -> tuple[Member, ...] | None:
        try:
            entry: dict[str, Any] = json.loads(index.read_bytes())
        except (OSError, ValueError):
            return None
        found = tuple(Member(*each) for each in entry["members"])
        inside = found if entry["sha256"] == digest else ()
        # They are not synced: after a power cut a file may be shorter than it was.
        whole = all(_nbytes(_place(self._spool, each.path)) == each.nbytes for each in inside if each.path != path)
        return found if inside and whole else None

    def _unpack(self, container: Member, file: BinaryIO, digest: str, depth: int) -> Iterator[Member]:
        """A member is written before any of its own members is: one process reads one file at a time."""
        file.seek(0)
        found, whole = list[Member](), True
        taken: set[str] = set()
        try:
            with closing(self._process.members(file, container.nbytes, shown(container.path), digest)) as members:
                for number, (name, data) in enumerate(members, 1):
                    self._members += 1
                    self._nbytes += len(data)
                    if self._members > MAX_MEMBERS or self._nbytes > MAX_NBYTES:
                        whole = False
                        break
                    path = f"{container.path}/{_free(_plain(name) or f'part {number}', taken)}"
                    _place(self._spool, path).write_bytes(data)
                    found.append(Member(path, len(data)))
        except ReadFailure:
            whole = False
        if is_document(container.path) or not whole or not found:
            yield container
        for each in found:
            if is_container(each.path) and depth < MAX_DEPTH:
                with opened(_place(self._spool, each.path)) as inner:
                    yield from self._unpack(each, inner, file_digest(inner, each.nbytes)[0], depth + 1)
            else:
                yield each


def _unopened(path: str, error: Exception, nbytes: int = 0) -> tuple[Member, ...]:
    unknown = isinstance(error, OSError) and is_document(path)
    return (Member(path, nbytes), *((Member(f"{path}/{_UNKNOWN}", 0),) if unknown else ()))


def shown(path: str) -> str:
    """The path as text that UTF-8 can hold: other bytes become `\\xNN`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _place(spool: Path, path: str) -> Path:
    return spool / blake2b(os.fsencode(path), digest_size=20).hexdigest()


def _nbytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _plain(path: str) -> str:
    """The parts of a path that are names, without what leads out of a folder or into a terminal: whoever made the
    container wrote it."""
    parts = clean(path.replace("\\", "/")).replace("\n", " ").replace("\t", " ").split("/")
    return "/".join(part.strip()[-_LONGEST_NAME:] for part in parts if part.strip() not in ("", ".", ".."))


def _free(path: str, taken: set[str]) -> str:
    """The path, numbered where another member has it."""
    found, number, place = path, 1, PurePosixPath(path)
    while found in taken:
        number += 1
        found = str(place.with_name(f"{place.stem} ({number}){place.suffix}"))
    taken.add(found)
    return found


def opened_document(folder: Path, path: str, spool: Path) -> BinaryIO:
    """A file of the folder, or of a container in it. Raises ReadFailure, OSError."""
    try:
        return opened(folder / path)
    except NotADirectoryError:
        return opened(_place(spool, path))


def opened(path: Path) -> BinaryIO:
    """A regular file: what was one when the folder was listed may be a pipe by now, which would never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ReadFailure(ReadCode.UNREADABLE, "it is not a regular file any more")
    return os.fdopen(descriptor, "rb")


def file_digest(file: BinaryIO, most: int) -> tuple[str, int]:
    """(sha256, bytes). Raises ReadFailure for a file with more than `most` bytes."""
    hashed, nbytes = sha256(), 0
    while data := file.read(_PIECE_NBYTES):
        hashed.update(data)
        nbytes += len(data)
        if nbytes > most:
            raise ReadFailure(ReadCode.TOO_LARGE, f"it has more than {most:,} bytes; split it, or leave it out")
    return hashed.hexdigest(), nbytes
