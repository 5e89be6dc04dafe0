"""The folders that moedge uses: stores of packed weights, the hub's cache, its own state. Torch-free."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from ...offload.budget import GIB, gib
from ...offload.machine.hardware import nearest_existing
from ...offload.store.stores import stores
from .finding import Finding, fail, ok, warn

# What `--disk auto` leaves alone (offload/store/disk_budget.py), and what a small model's store takes.
_LITTLE_ROOM = 20 * GIB


def check_stores(root: Path) -> Finding:
    """Where packed weights go, and what room there is for them."""
    if not _writable(root):
        return fail("stores", f"{root} cannot be written", "give --disk-dir FOLDER, or set disk-dir in moedge.toml")
    found = stores(root)
    taken = f"{len(found)} stores of {gib(sum(store.nbytes for store in found))}" if found else "no store yet"
    free = free_nbytes(root)
    says = f"{root}: {taken}, {gib(free)} free"
    if free < _LITTLE_ROOM:
        return warn("stores", says, "moedge models prune --keep SIZE, or --disk-dir FOLDER on another disk")
    return ok("stores", says)


def check_hub_cache(cache: Path, offline: bool) -> list[Finding]:
    """Where checkpoints are downloaded to: room, and downloads that were cut off."""
    if not _writable(cache):
        return [fail("model cache", f"{cache} cannot be written", "export HF_HOME=FOLDER that you can write")]
    says = f"{cache}: {gib(free_nbytes(cache))} free" + (", HF_HUB_OFFLINE is set: nothing is downloaded" * offline)
    if free_nbytes(cache) < _LITTLE_ROOM:
        found = [warn("model cache", says, "export HF_HOME=FOLDER on a disk with more room")]
    else:
        found = [ok("model cache", says)]
    if cut := list(unfinished_downloads(cache)):
        some = ", ".join(cut[:3]) + (f" and {len(cut) - 3} more" if len(cut) > 3 else "")
        found.append(warn("downloads", f"not finished: {some}", f"hf download {cut[0]}"))
    return found


def unfinished_downloads(cache: Path) -> Iterable[str]:
    """Ids of models of which the hub's cache holds files that were cut off."""
    for folder in sorted(cache.glob("models--*")):
        if any(folder.glob("blobs/*.incomplete")):
            yield folder.name.removeprefix("models--").replace("--", "/")


def check_state(path: Path) -> Finding:
    """Whether what is measured can be kept in the file `path`."""
    if _writable(path.parent):
        return ok("state", f"profiles and the list of jobs are kept in {path.parent}")
    return warn("state", f"{path.parent} cannot be written: nothing is remembered", "export XDG_STATE_HOME=FOLDER")


def free_nbytes(folder: Path) -> int:
    """Bytes that this user may still write there; the folder need not exist yet."""
    return shutil.disk_usage(nearest_existing(folder)).free


def _writable(folder: Path) -> bool:
    return os.access(nearest_existing(folder), os.W_OK | os.X_OK)
