"""Host memory: how much this process may use, uses now, and has used at most, and what malloc keeps. Torch-free."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

# v1 writes "no limit" as the largest multiple of the page size below 2^63; no machine has 2^60 bytes.
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A cgroup that limits memory, in bytes; `used` excludes the page cache that the kernel can drop."""

    folder: Path
    limit: int
    used: int

    @property
    def headroom(self) -> int:
        return self.limit - self.used


@dataclass(frozen=True, slots=True)
class _Version:
    """The file names of one cgroup version; counters of memory.stat that include child groups have `stat_prefix`."""

    limits: tuple[str, ...]
    usage: str
    stat_prefix: str


# memory.high counts as a limit too: above it the kernel throttles a process severely instead of refusing memory. Swap
# limits and v1's soft limit do not bound anything that a plan may use.
_V1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")
_V2 = _Version(("memory.max", "memory.high"), "memory.current", "")


@dataclass(frozen=True, slots=True)
class _Mount:
    """A mounted hierarchy: the folder of group `root`, as /proc/self/cgroup names it, is mounted at `point`."""

    version: _Version
    root: PurePosixPath
    point: Path


def memory_groups(root: Path = Path("/")) -> list[MemoryGroup]:
    """All memory cgroups with a limit, from the process's own to the outermost visible one, v1 and v2.

    `root` replaces `/` in paths. Files that are missing or unreadable set no limit.
    """
    mounts = list(_memory_mounts(root))
    folders = {folder: version for version, path in _own_paths(root) for folder in _folders(version, path, mounts)}
    groups = (_group(folder, version) for folder, version in folders.items())
    return [group for group in groups if group is not None]


def _own_paths(root: Path) -> Iterator[tuple[_Version, PurePosixPath]]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield _V2, PurePosixPath(path)
        elif "memory" in controllers.split(","):
            yield _V1, PurePosixPath(path)


def _memory_mounts(root: Path) -> Iterator[_Mount]:
    """The mounted hierarchies that can have a memory controller; proc_pid_mountinfo(5) has the line format."""
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, source = line.partition(" - ")
        kind, _, options = source.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            group, point = (_unescaped(field) for field in mount.split(" ")[3:5])
            yield _Mount(_V2 if kind == "cgroup2" else _V1, PurePosixPath(group), root / point.lstrip("/"))


def _folders(version: _Version, path: PurePosixPath, mounts: list[_Mount]) -> Iterator[Path]:
    """The folders of the group `path` and of its ancestors, as far up as they are mounted."""
    usable = [mount for mount in mounts if mount.version is version]
    inside = ".." not in path.parts
    matching = [mount for mount in usable if inside and path.is_relative_to(mount.root)]
    for mount in matching:
        yield from _upwards(mount.point / path.relative_to(mount.root), mount.point)
    if usable and not matching:
        point = usable[-1].point
        yield from _upwards(_longest_tail(path, point), point)


def _upwards(own: Path, point: Path) -> list[Path]:
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(point)]


def _longest_tail(path: PurePosixPath, point: Path) -> Path:
    """The folder of the longest suffix of `path` that exists, for a namespace that hides how path and mount relate."""
    parts = [part for part in path.parts if part not in {"/", ".."}]
    tails = (point.joinpath(*parts[start:]) for start in range(len(parts)))
    return next((folder for folder in tails if folder.is_dir()), point)


def _group(folder: Path, version: _Version) -> MemoryGroup | None:
    stat = _counters(folder / "memory.stat")
    limits = [_number(folder / name) for name in version.limits]
    # In a container, v1 shows only one folder; this counter includes the limits of the hidden ancestors.
    limits.append(stat.get("hierarchical_memory_limit"))
    known = [limit for limit in limits if limit is not None and limit < _UNLIMITED]
    if not known:
        return None
    used = (_number(folder / version.usage) or 0) - _reclaimable(stat, version.stat_prefix)
    return MemoryGroup(folder, min(known), max(0, used))


def _reclaimable(stat: dict[str, int], prefix: str) -> int:
    """The bytes of page cache that the kernel drops before it refuses memory.

    Both lists count: a checkpoint that was read twice, or was just downloaded, is on the active one and is dropped as
    well. tmpfs is on neither list. Mapped pages do not count: they are mostly running code, which would have to be read
    again.
    """
    cache = stat.get(prefix + "inactive_file", 0) + stat.get(prefix + "active_file", 0)
    mapped = stat.get(prefix + ("mapped_file" if prefix else "file_mapped"), 0)
    return max(0, cache - mapped)


def _counters(path: Path) -> dict[str, int]:
    pairs = (line.partition(" ") for line in _lines(path))
    return {name: int(value) for name, _, value in pairs if value.isdigit()}


def _number(path: Path) -> int | None:
    """The number in a file; None for `max` and for a missing file, as in the root group."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _unescaped(field: str) -> str:
    r"""mountinfo writes a space as `\040`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def host_total(root: Path = Path("/")) -> int:
    """The bytes that this process could use if it were alone: the minimum of RAM, cgroup limits and rlimits."""
    limits = [group.limit for group in memory_groups(root)]
    return min([int(psutil.virtual_memory().total), *limits, *(limit for limit, _ in _process_limits())])


def host_available(root: Path = Path("/")) -> int:
    """The bytes that can still be allocated: the minimum over the host, all cgroups of this process, and rlimits.

    Swap is not counted. `root` replaces `/` in the paths of cgroups.
    """
    free = [group.headroom for group in memory_groups(root)]
    free += [limit - used for limit, used in _process_limits()]
    return max(0, min([int(psutil.virtual_memory().available), *free]))


def host_peak() -> int:
    """The peak resident size of this process so far, in bytes (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM line; a Linux kernel was wanted")


def reset_host_peak() -> None:
    """Lets `host_peak` count from now on (proc_pid_clear_refs(5)); where the kernel forbids it, nothing changes."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def host_resident() -> int:
    """The resident size of this process now, in bytes."""
    return _statm()[1]


def _process_limits() -> list[tuple[int, int]]:
    """(limit, used) in bytes of this process's own rlimits that are set: address space and data."""
    statm = _statm()
    pairs = [(resource.RLIMIT_AS, statm[0]), (resource.RLIMIT_DATA, statm[5])]
    limits = [(resource.getrlimit(kind)[0], used) for kind, used in pairs]
    return [(limit, used) for limit, used in limits if limit != resource.RLIM_INFINITY]


def refused_library(error: BaseException | None) -> str:
    """The sentence for a library, such as torch, that a limit on this process keeps from being loaded; else ""."""
    limits = [f"{text} of {limit >> 20:,} MiB" for kind, text in _LIMITS.items() if (limit := _limit(kind))]
    while error is not None and not _is_unmapped(error):
        error = error.__cause__ or error.__context__
    if error is None or not limits:
        return ""
    # The loader says the file first: /usr/lib/python3/site-packages/torch/lib/libtorch_cpu.so: failed to map segment
    file = Path(str(error).partition(": ")[0])
    library = "torch" if "torch" in str(file) else file.name
    return f"{library} cannot be loaded within the limit on {' and '.join(limits)}; raise it"


# The dynamic loader's words.
_UNMAPPED = re.compile(r"failed to map segment|cannot map zero-fill pages|[Cc]annot allocate memory")
_LIMITS = {resource.RLIMIT_AS: "address space (ulimit -v)", resource.RLIMIT_DATA: "data (ulimit -d)"}


def _is_unmapped(error: BaseException) -> bool:
    # ctypes raises an OSError without a number for what the loader says; others are of the system's own calls.
    loading = isinstance(error, ImportError) or (isinstance(error, OSError) and error.errno is None)
    return loading and _UNMAPPED.search(str(error)) is not None


def _limit(kind: int) -> int | None:
    limit = resource.getrlimit(kind)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _statm() -> list[int]:
    """The sizes of this process in bytes: total, resident, shared, text, 0, data and stack, 0."""
    page = os.sysconf("SC_PAGE_SIZE")
    # This runs after every pass; os.read takes a third of the time of a Python file object.
    descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return [int(pages) * page for pages in os.read(descriptor, 256).split()]
    finally:
        os.close(descriptor)


# glibc's parameters (malloc.h): from the first size on, an allocation is a mapping of its own, which is returned to the
# system when it is freed; from the second size on, free bytes at the end of the heap are returned.
_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
# How many heaps threads share. What is free at the end of another heap than the first is never returned, up to 64 MiB
# of each: two threads that packed weights kept 126 MiB that no plan knew of.
_M_ARENA_MAX = -8
# glibc's own, which `keep_memory` raises.
_TRIMMED_NBYTES = 128 << 10
# A process may grow by this much between two checks: tables, texts, and cache pages used for the first time.
MARGIN_NBYTES = 8 << 20
# The free memory that a heap which keeps buffers may hold; a job needs as much headroom to use `keep_memory`.
KEPT_NBYTES = 512 << 20


def return_memory() -> None:
    """Gives every large allocation a mapping of its own, which is returned to the system when it is freed.

    By default glibc raises the threshold up to 32 MiB. Then the buffers of a pass share one heap with small objects and
    fragment it: a job of 512 sequences grew by 5 MiB a pass and exceeded its budget (bench/results/log.md).

    Call it before threads allocate: those that did keep heaps of their own.
    """
    _set(_M_ARENA_MAX, 1)
    _set(_M_MMAP_THRESHOLD, 1 << 20)
    _set(_M_TRIM_THRESHOLD, _TRIMMED_NBYTES)


def keep_memory() -> None:
    """Lets a pass reuse the memory of the previous pass, up to KEPT_NBYTES. Use a `Heap` to bound the growth.

    A new mapping is zeroed page by page: a norm of 512 tokens takes 4.9 ms with `return_memory`, 1.2 ms with this
    (bench/results/log.md).
    """
    _set(_M_ARENA_MAX, 1)
    _set(_M_MMAP_THRESHOLD, 32 << 20)
    _set(_M_TRIM_THRESHOLD, 256 << 20)


def _set(name: int, nbytes: int) -> None:
    # Other C libraries have neither this function nor this behaviour.
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(name, nbytes)


def trim() -> None:
    """Returns all free memory of the heap to the system; other C libraries keep none in this way."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Heap:
    """Bounds the free memory that glibc keeps for the next pass to what one pass needs.

    Passes allocate and free buffers between small objects that stay, which fragments the heap. When the process has
    grown, all free memory is returned to the system; otherwise it is kept. Create it after the largest pass: what that
    pass left free is what later passes may keep.
    """

    def __init__(self) -> None:
        before = host_resident()
        self._spare = max(0, before - self._settled())
        self._limit = before + MARGIN_NBYTES
        self.num_trims = 0

    def after_pass(self) -> None:
        """Returns all free memory to the system if the process has grown beyond its limit."""
        if host_resident() <= self._limit:
            return
        self._limit = self._settled() + self._spare + MARGIN_NBYTES
        self.num_trims += 1

    def _settled(self) -> int:
        """Returns all free memory to the system; the resident bytes after that."""
        trim()
        return host_resident()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the garbage collector while many objects without reference cycles, such as tensor entries or modules, are
    created.

    Otherwise it traverses all of them again and again while their number grows, which takes a third of the time that
    reading the headers of a large checkpoint takes, and a quarter of what importing torch and transformers takes.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
