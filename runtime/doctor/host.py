"""The host's memory and the limits on this process. Torch-free."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...offload.budget import GIB, auto_host, gib
from ...offload.cgroup import MemoryGroup, memory_groups
from ...offload.memory import host_available, host_total
from .finding import Finding, fail, ok, warn

# A process with torch, transformers and bitsandbytes, and a gigabyte to do something with.
_LEAST_ROOM = 3 * GIB // 2
# A store of a hundred layers is a hundred open files.
_LEAST_FILES = 512


@dataclass(frozen=True, slots=True)
class HostMemoryFacts:
    """`ram` and `swap` are the machine's, `total` and `available` what limits leave of it, bytes."""

    ram: int
    swap: int
    total: int
    available: int
    groups: Sequence[MemoryGroup] = ()


def find_host_memory() -> HostMemoryFacts:
    return HostMemoryFacts(
        int(psutil.virtual_memory().total),
        int(psutil.swap_memory().total),
        host_total(),
        host_available(),
        memory_groups(Path("/")),
    )


def check_memory(memory: HostMemoryFacts) -> Finding:
    found = (
        f"{gib(memory.ram)}, {gib(memory.available)} available, {_limit(memory)}; "
        f"--ram auto takes {gib(auto_host(memory.available))}"
    )
    found += f"; swap {gib(memory.swap)} is not used by plans" if memory.swap else ""
    if memory.available < _LEAST_ROOM:
        return fail("RAM", found, f"free some: {gib(_LEAST_ROOM)} are the least that any model takes" + _loosen(memory))
    if memory.total < memory.ram // 2:
        return warn("RAM", found, "if that is not meant," + _loosen(memory).removeprefix(";"))
    return ok("RAM", found)


def check_open_files(limit: int | None = None) -> Finding:
    """`limit` is what the process may open at once, asked of the kernel if not given."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if most < _LEAST_FILES:
        return warn("open files", f"at most {most:,}, and a store is a file per layer", "ulimit -n 4096")
    return ok("open files", f"at most {most:,}")


def _binding(memory: HostMemoryFacts) -> MemoryGroup | None:
    """The group that sets the total, if it is one."""
    return next((group for group in memory.groups if group.limit == memory.total), None)


def _limit(memory: HostMemoryFacts) -> str:
    if memory.total >= memory.ram:
        return "no limit below that"
    group = _binding(memory)
    return f"limited to {gib(memory.total)} by " + (f"the cgroup {group.folder}" if group else "ulimit")


def _loosen(memory: HostMemoryFacts) -> str:
    if memory.total >= memory.ram:
        return ""
    group = _binding(memory)
    if group is None:
        return "; raise the limit: ulimit -v unlimited -d unlimited"
    return f"; raise the limit of {group.folder} (docker run --memory, systemd MemoryMax=)"
