"""How much host memory this process may use and how much it used at most. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_UNLIMITED = 1 << 60


def host_peak() -> int:
    """Largest resident size of this process so far, in bytes (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM line; a Linux kernel was wanted")


def host_resident() -> int:
    """Resident size of this process now, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def host_available() -> int:
    """Bytes that can still be taken: the least over the host and every memory cgroup above this process."""
    rooms = [int(psutil.virtual_memory().available)]
    rooms += [room for folder in _memory_cgroups() if (room := _room(folder)) is not None]
    return max(0, min(rooms))


def _memory_cgroups(root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Folders of the memory controller, own group first, up to its root (cgroup v2 and v1)."""
    folders: list[Path] = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "memory" if controllers else root
        own = mount / path.lstrip("/")
        folders += [folder for folder in (own, *own.parents) if folder.is_relative_to(mount)]
    return folders


def _room(folder: Path) -> int | None:
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (folder / limit_name).read_text().strip()
            if limit == "max" or int(limit) >= _UNLIMITED:
                return None
            usage = int((folder / usage_name).read_text())
            return int(limit) - usage + _reclaimable(folder / "memory.stat", cache_name)
        except (FileNotFoundError, NotADirectoryError):
            continue
    return None


def _reclaimable(stat: Path, key: str) -> int:
    """Page cache that the kernel drops before it refuses memory."""
    for line in stat.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
