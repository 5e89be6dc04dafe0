"""A disk between a job and its files: it counts the calls that change it, fails or dies at one of them, loses power."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch


class Crash(BaseException):
    """The process is dead from here on: no call has any effect."""


@dataclass
class Disk:
    """Dies at call `last`, or, with `fault`, fails that one call with this error and lives on.

    `only` restricts counting to calls of this name. What was not synchronized may be lost with the power: `lose` takes
    it away at random. `honest` False forgets to note what fdatasync and fsync make durable, so nothing ever is.
    """

    last: int = 1 << 60
    fault: int = 0
    only: str = ""
    short: bool = False
    calls: list[str] = field(default_factory=list)
    faults: int = 0
    unsynced: dict[str, int] = field(default_factory=dict)
    names: list[Callable[[], None]] = field(default_factory=list)
    synced: set[str] = field(default_factory=set)

    def count(self, name: str) -> None:
        if self.only and name != self.only:
            return
        self.calls.append(name)
        if self.fault:
            if len(self.calls) == self.last:
                self.faults += 1
                raise OSError(self.fault, os.strerror(self.fault))
        elif len(self.calls) >= self.last:
            raise Crash

    def lose(self, generator: random.Random) -> None:
        """The power fails: any part of what was not synchronized is there, or zeros, or gone; so are new names."""
        for path, synced in self.unsynced.items():
            if os.path.exists(path) and generator.random() < 0.8:
                _spoil(path, synced, generator)
        for undo in reversed(self.names):
            if generator.random() < 0.5:
                undo()


def _spoil(path: str, synced: int, generator: random.Random) -> None:
    size = os.path.getsize(path)
    if size <= synced:
        return
    with open(path, "r+b") as file:
        # Pages come back in any combination: some are whole, some are zeros.
        for begin in range(synced, size, 64):
            if generator.random() < 0.3:
                file.seek(begin)
                file.write(bytes(min(64, size - begin)))
        if generator.random() < 0.7:
            file.truncate(generator.randint(synced, size))


@contextmanager
def patched(disk: Disk) -> Iterator[None]:
    real = {
        name: getattr(os, name)
        for name in ("open", "pwrite", "fsync", "fdatasync", "replace", "unlink", "mkdir", "ftruncate")
    }

    def opened(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
        if flags & os.O_CREAT and not os.path.exists(path):
            disk.count("create")
            disk.names.append(lambda: Path(path).unlink(missing_ok=True))
            disk.unsynced[str(path)] = 0
        descriptor = real["open"](path, flags, *arguments, **keywords)
        return int(descriptor)

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        path = path_of(descriptor)
        disk.unsynced.setdefault(path, os.fstat(descriptor).st_size)
        try:
            disk.count("write")
        except (Crash, OSError) as error:
            if len(disk.calls) == disk.last and not path.endswith("lock"):
                real["pwrite"](descriptor, bytes(data)[: len(data) // 2], offset)
                if disk.short and isinstance(error, OSError):
                    return len(data) // 2
            raise
        return int(real["pwrite"](descriptor, data, offset))

    def synchronize(name: str) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            disk.count(name)
            path = path_of(descriptor)
            if os.path.isdir(path):
                disk.names.clear()
            else:
                disk.unsynced.pop(path, None)
                disk.synced.add(path)

        return call

    def replace(source: Any, target: Any) -> None:
        disk.count("rename")
        before = Path(target).read_bytes() if os.path.exists(target) else None
        real["replace"](source, target)
        if str(source) not in disk.synced:
            disk.unsynced[str(target)] = disk.unsynced.pop(str(source), 0)
        disk.names.append(lambda: _rename_back(source, target, before))

    def unlink(path: Any, **keywords: Any) -> None:
        if os.path.lexists(path):
            disk.count("unlink")
        real["unlink"](path, **keywords)

    def mkdir(path: Any, *arguments: Any, **keywords: Any) -> None:
        if not os.path.exists(path):
            disk.count("mkdir")
        real["mkdir"](path, *arguments, **keywords)

    def ftruncate(descriptor: int, length: int) -> None:
        disk.count("truncate")
        real["ftruncate"](descriptor, length)

    fakes = {
        "open": opened, "pwrite": pwrite, "replace": replace, "unlink": unlink, "mkdir": mkdir, "ftruncate": ftruncate,
        "fsync": synchronize("fsync"), "fdatasync": synchronize("fdatasync"),
    }  # fmt: skip
    with patch.multiple(os, **fakes):
        yield


def path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _rename_back(source: Any, target: Any, before: bytes | None) -> None:
    if os.path.exists(target):
        os.rename(target, source)
    if before is not None:
        Path(target).write_bytes(before)
