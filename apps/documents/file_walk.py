"""The files of a folder, in a stable order: what is read, and what is skipped for which reason."""

from __future__ import annotations

import os
import stat
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import overload

from ...face import errors


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


@dataclass(frozen=True, slots=True)
class FoundFile:
    """`path` is relative to the folder, with `/`. `skipped` says why it is not read; None for a file that is."""

    path: str
    skipped: Skipped | None = None
    nbytes: int = 0

    @property
    def name(self) -> str:
        """The path as text that UTF-8 can hold: other bytes become `\\xNN`."""
        return os.fsencode(self.path).decode("utf-8", "backslashreplace")


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
    folder: str | os.PathLike[str], *, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Iterator[FoundFile]:
    """Every file below `folder` exactly once, skipped ones too; the content of hidden folders counts as hidden.

    `include` and `exclude` are globs of the whole path (`invoices/*.pdf`) or, without a slash, of the name (`*.pdf`);
    a `*` also matches slashes. Raises InputUnreadable for a folder that cannot be listed.
    """
    root = Path(folder)
    if not root.is_dir():
        raise errors.InputUnreadable(f"{root} is not a folder; give the folder that holds the documents")
    yield from _walk(root, os.path.realpath(root), "", include, exclude)


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
    for entry in entries:
        path = f"{below}/{entry.name}" if below else entry.name
        if entry.name.startswith("."):
            yield FoundFile(path, Skipped.HIDDEN)
        elif entry.is_dir(follow_symlinks=False):
            yield from _walk(root, real_root, path, include, exclude)
        else:
            yield _found(entry, path, real_root, include, exclude)


def _found(
    entry: os.DirEntry[str], path: str, real_root: str, include: Sequence[str], exclude: Sequence[str]
) -> FoundFile:
    if include and not any(_matches(path, glob) for glob in include):
        return FoundFile(path, Skipped.NOT_INCLUDED)
    if any(_matches(path, glob) for glob in exclude):
        return FoundFile(path, Skipped.EXCLUDED)
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
    return FoundFile(path, None, status.st_size)


def _matches(path: str, glob: str) -> bool:
    return fnmatchcase(path if "/" in glob else path.rpartition("/")[2], glob)
