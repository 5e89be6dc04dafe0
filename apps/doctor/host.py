"""The host's memory and the limits on this process. Torch-free."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...face import (
    GIB,
    MemoryGroup,
    auto_host,
    counted,
    gib,
    host_available,
    host_total,
    lacking,
    memory_groups,
    nearest_existing,
    stores,
)
from .finding import Finding, fail, ok, warn

# A process with torch, transformers and bitsandbytes, and a gigabyte for a model.
_LEAST_MEMORY = 3 * GIB // 2
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
    if memory.available < _LEAST_MEMORY:
        return fail("RAM", found, f"free some: any model needs at least {gib(_LEAST_MEMORY)}" + _loosen(memory))
    if memory.total < memory.ram // 2:
        return warn("RAM", found, "if that is not intended," + _loosen(memory).removeprefix(";"))
    return ok("RAM", found)


def check_open_files(limit: int | None = None) -> Finding:
    """`limit` is what the process may open at once, asked of the kernel if not given."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if most < _LEAST_FILES:
        return warn("open files", f"at most {most:,}; prepared weights have one file per layer", "ulimit -n 4096")
    return ok("open files", f"at most {most:,}")


def check_confinement() -> Finding:
    """Whether native code that is taken over by a file is held by the kernel."""
    if missing := lacking():
        found = f"this kernel has no {missing}: native code that a document takes over is bound by limits alone"
        return warn(
            "confinement", found, "a Linux kernel from 5.13 on, with both built in, or documents of people you trust"
        )
    return ok("confinement", "readers of documents and chat templates are shut in by Landlock and seccomp")


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


# The space that `--disk auto` keeps free (offload/store/stores.py), and that a small model needs.
_LITTLE_DISK = 20 * GIB


def check_stores(root: Path) -> Finding:
    """The folder for prepared weights and its free space."""
    if not _writable(root):
        return fail("stores", f"{root} cannot be written", "give --disk-dir FOLDER, or set disk-dir in moedge.toml")
    found = stores(root)
    taken = (
        f"{counted(len(found), 'store')} of {gib(sum(store.nbytes for store in found))}" if found else "no store yet"
    )
    free = free_nbytes(root)
    says = f"{root}: {taken}, {gib(free)} free"
    if free < _LITTLE_DISK:
        return warn("stores", says, "moedge models prune --keep SIZE, or --disk-dir FOLDER on another disk")
    return ok("stores", says)


def check_hub_cache(cache: Path, offline: bool) -> list[Finding]:
    """The folder for downloaded checkpoints: its free space, and unfinished downloads."""
    if not _writable(cache):
        return [fail("model cache", f"{cache} cannot be written", "export HF_HOME=FOLDER that you can write")]
    says = f"{cache}: {gib(free_nbytes(cache))} free" + (", HF_HUB_OFFLINE is set: nothing is downloaded" * offline)
    if free_nbytes(cache) < _LITTLE_DISK:
        found = [warn("model cache", says, "export HF_HOME=FOLDER on a disk with more space")]
    else:
        found = [ok("model cache", says)]
    if cut := list(unfinished_downloads(cache)):
        some = ", ".join(cut[:3]) + (f" and {len(cut) - 3} more" if len(cut) > 3 else "")
        found.append(warn("downloads", f"not finished: {some}", f"hf download {cut[0]}"))
    return found


def unfinished_downloads(cache: Path) -> Iterable[str]:
    """Ids of models with unfinished files in the cache of the hub."""
    for folder in sorted(cache.glob("models--*")):
        if any(folder.glob("blobs/*.incomplete")):
            yield folder.name.removeprefix("models--").replace("--", "/")


def check_state(path: Path) -> Finding:
    """Whether measurements can be saved to `path`."""
    if _writable(path.parent):
        return ok("state", f"profiles and the list of jobs are kept in {path.parent}")
    return warn(
        "state",
        f"{path.parent} cannot be written: measurements and jobs are not recorded",
        "export XDG_STATE_HOME=FOLDER",
    )


def free_nbytes(folder: Path) -> int:
    """Bytes that this user may still write to a folder, which need not exist yet."""
    return shutil.disk_usage(nearest_existing(folder)).free


def _writable(folder: Path) -> bool:
    return os.access(nearest_existing(folder), os.W_OK | os.X_OK)
