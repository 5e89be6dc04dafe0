"""How much host memory this process may use and how much it used at most. Torch-free."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import psutil

from .cgroup import memory_groups


def host_total(root: Path = Path("/")) -> int:
    """Bytes this process could take if it were alone: the least of RAM, cgroup limits and rlimits."""
    limits = [group.limit for group in memory_groups(root)]
    return min([int(psutil.virtual_memory().total), *limits, *(limit for limit, _ in _process_limits())])


def host_available(root: Path = Path("/")) -> int:
    """Bytes that can still be taken: the least over the host, every memory cgroup above this process, and rlimits.

    Swap is not counted. `root` stands for `/` where cgroups are looked up.
    """
    rooms = [group.room for group in memory_groups(root)]
    rooms += [limit - used for limit, used in _process_limits()]
    return max(0, min([int(psutil.virtual_memory().available), *rooms]))


def host_peak() -> int:
    """Largest resident size of this process so far, in bytes (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM line; a Linux kernel was wanted")


def host_resident() -> int:
    """Resident size of this process now, in bytes."""
    return _statm()[1]


def _process_limits() -> list[tuple[int, int]]:
    """(limit, used) of this process's own limits that are set: address space and data, bytes."""
    statm = _statm()
    pairs = [(resource.RLIMIT_AS, statm[0]), (resource.RLIMIT_DATA, statm[5])]
    limits = [(resource.getrlimit(kind)[0], used) for kind, used in pairs]
    return [(limit, used) for limit, used in limits if limit != resource.RLIM_INFINITY]


def _statm() -> list[int]:
    """Sizes of this process in bytes: total, resident, shared, text, 0, data and stack, 0."""
    page = os.sysconf("SC_PAGE_SIZE")
    # Asked for after every pass: without Python's layers of files it takes a third of the time.
    descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return [int(pages) * page for pages in os.read(descriptor, 256).split()]
    finally:
        os.close(descriptor)
