"""Runs a command in a memory cgroup of its own: all that it and the page cache of its files take counts.

    python tests/support/memory_ceiling.py 4GiB COMMAND...        # needs root, or a delegated cgroup

Pages that were in memory before are charged to whoever brought them in: page_cache.py drops files first. Says at
the end what the group's peak was, whether the kernel killed in it for want of memory, and how much came from disks.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import FrameType, TracebackType

from moedge.offload.budget import GIB, parse_size

CGROUPS = Path("/sys/fs/cgroup")
_numbers = itertools.count()


class NoGroup(Exception):
    """No memory group can be made here; the message says where it was tried and what to do."""


@dataclass(frozen=True, slots=True)
class Interface:
    """The files of a memory group in one version of cgroups; `oom` has a line `oom_kill N` in both."""

    version: int
    limit: str
    peak: str
    oom: str
    swap: str

    def swap_limit(self, limit: int) -> int:
        """What to write so that nothing is swapped: version 1 counts memory and swap together."""
        return limit if self.version == 1 else 0


V1 = Interface(
    1, "memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control", "memory.memsw.limit_in_bytes"
)
V2 = Interface(2, "memory.max", "memory.peak", "memory.events", "memory.swap.max")


class MemoryGroup:
    """A group that may use `limit` bytes, no swap; as a context, it ends with its processes killed and itself removed.

    Raises NoGroup where `folder` is no memory group or does not take the limit.
    """

    def __init__(self, folder: Path, interface: Interface, limit: int, swaps: Path = Path("/proc/swaps")) -> None:
        self.folder, self.interface, self.limit = folder, interface, limit
        for name in (interface.limit, interface.peak, interface.oom):
            if not (folder / name).exists():
                raise NoGroup(f"no {name}: its memory controller is off, or the kernel is older than 5.19")
        (folder / interface.limit).write_text(str(limit))
        found = (folder / interface.limit).read_text().strip()
        if found == "max" or int(found) > limit:
            raise NoGroup(f"{interface.limit} is {found} after {limit} was written")
        if (folder / interface.swap).exists():
            (folder / interface.swap).write_text(str(interface.swap_limit(limit)))
        elif len(swaps.read_text().splitlines()) > 1:
            raise NoGroup(f"no {interface.swap}, and this machine has swap: run `swapoff -a`")

    def peak(self) -> int:
        """Most bytes that were charged to the group at a time: memory, page cache, and the kernel's for both."""
        return int((self.folder / self.interface.peak).read_text())

    def killed(self) -> bool:
        """Whether the kernel killed a process of the group because it reached its limit."""
        for line in (self.folder / self.interface.oom).read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count) > 0
        raise NoGroup(f"{self.folder / self.interface.oom} has no line oom_kill: the kernel is older than 4.13")

    def inside(self, command: list[str]) -> list[str]:
        """The command that enters the group and then becomes `command`."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # Killed processes leave a group some time after their signal.
        for _ in range(100):
            for process in (self.folder / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            with suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.1)
        raise OSError(f"{self.folder} cannot be removed; end its processes, then run rmdir")


def places(root: Path, own: str) -> Iterator[tuple[Interface, Path]]:
    """Where a group may be made: at the root of a memory hierarchy, then in each group that this process is in.

    `own` is the text of /proc/self/cgroup: lines of `number:controllers:path`, no controllers in version 2.
    """
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        interface, hierarchy = (V1, root / "memory") if controllers else (V2, root)
        parts = PurePosixPath(path).parts[1:]
        for depth in range(len(parts) + 1):
            place = hierarchy.joinpath(*parts[:depth])
            if (place / "cgroup.procs").exists():
                yield interface, place


def make_group(limit: int, root: Path = CGROUPS, own: str | None = None) -> MemoryGroup:
    """A new group of at most `limit` bytes. Raises NoGroup."""
    tried = []
    for interface, place in places(root, Path("/proc/self/cgroup").read_text() if own is None else own):
        folder = place / f"ceiling-{os.getpid()}-{next(_numbers)}"
        try:
            folder.mkdir()
        except OSError as error:
            tried.append(f"{place}: {error.strerror}")
            continue
        try:
            return MemoryGroup(folder, interface, limit)
        except (NoGroup, OSError) as error:
            folder.rmdir()
            tried.append(f"{place}: {error}")
    found = "; ".join(tried) or f"none is mounted under {root}"
    raise NoGroup(
        f"no memory controller takes a new group ({found}); run as root or in a delegated cgroup, or without a ceiling"
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended. `read_nbytes` came from block devices, by all that it started and waited for.

    `peak_nbytes` is the group's, None where there was none; `killed`: by the kernel, for reaching the group's limit;
    `late`: by us, after the time it was given.
    """

    code: int
    out: str = ""
    err: str = ""
    read_nbytes: int = 0
    peak_nbytes: int | None = None
    killed: bool = False
    late: bool = False


def run(command: list[str], limit: int | None = None, seconds: float | None = None, capture: bool = True) -> Outcome:
    """Runs `command` with at most `limit` bytes and for at most `seconds`. Raises NoGroup.

    A process's own count of reads has page faults of mapped files, misses of the page cache and direct reads in it.
    The block devices' counters of cgroups do not count for every device.
    """
    if limit is None:
        return _run(command, seconds, capture)
    with make_group(limit) as group:
        done = _run(group.inside(command), seconds, capture)
        return replace(done, peak_nbytes=group.peak(), killed=group.killed())


def _run(command: list[str], seconds: float | None, capture: bool) -> Outcome:
    pipe = subprocess.PIPE if capture else None
    before, late = _read_nbytes(), False
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, process_group=0) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            late = True
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return Outcome(process.returncode, out or "", err or "", _read_nbytes() - before, late=late)


def _read_nbytes() -> int:
    """What children that ended have read; the kernel counts in blocks of 512 bytes."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock * 512


def clean_up_when_told_to_end() -> None:
    """SIGTERM ends this process as an exception does, so that groups are removed and nothing runs on."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def main() -> None:
    clean_up_when_told_to_end()
    limit = parse_size(sys.argv[1], 0, 0)
    try:
        done = run(sys.argv[2:], limit, capture=False)
    except NoGroup as error:
        raise SystemExit(str(error)) from error
    peak = f"a peak of {(done.peak_nbytes or 0) / GIB:.3f} GiB under {limit / GIB:.3f}"
    print(f"ceiling: {'killed, ' * done.killed}{peak}, {done.read_nbytes / 1e9:.3f} GB read", file=sys.stderr)
    raise SystemExit(done.code if done.code >= 0 else 128 - done.code)


if __name__ == "__main__":
    main()
