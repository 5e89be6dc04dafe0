"""All stores under one root: lists and removes them, and computes their disk budget. Opens no shard."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from platformdirs import user_cache_path

from ..errors import BadStore, OutOfBudget, StoreInUse
from ..machine.hardware import nearest_existing
from .manifest import (
    LOCK,
    MANIFEST,
    PROGRESS,
    Manifest,
    canonical,
    lock_to_write,
    read_manifest,
    remove_files_except,
    store_files,
)

_MAX_NAME_LENGTH = 60
_HASH_DIGITS = 12


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """A store, which may be complete, begun or damaged; `recipe` is None if it cannot be read.

    `nbytes` is its size on disk now; `last_used` is in seconds since 1970.
    """

    folder: Path
    nbytes: int
    recipe: Mapping[str, Any] | None
    complete: bool
    last_used: float

    @property
    def name(self) -> str:
        return self.folder.name


def default_root() -> Path:
    """The folder of this user's stores."""
    return user_cache_path("moedge") / "stores"


def store_folder(root: Path, model: str, fingerprint: str, recipe: Mapping[str, Any]) -> Path:
    """The folder of the store with these inputs: the readable part of the model's name, and a hash of the inputs."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip(".-")[-_MAX_NAME_LENGTH:].strip(".-")
    digest = sha256(canonical([fingerprint, recipe])).hexdigest()[:_HASH_DIGITS]
    return root / f"{readable or 'model'}-{digest}"


def stores(root: Path) -> list[StoreSummary]:
    """All stores under `root`, sorted by name; folders without a lock file are skipped."""
    if not root.is_dir():
        return []
    return [_summary(folder) for folder in sorted(root.iterdir()) if (folder / LOCK).is_file()]


def remove(folder: Path) -> None:
    """Removes a store. Raises StoreInUse while it is used or written, BadStore if the folder has any other file."""
    if not (folder / LOCK).is_file():
        raise BadStore(f"{folder} is not a store: no file {LOCK!r} in it; `moedge models ls` lists the stores")
    store_files(folder)
    lock = lock_to_write(folder)
    try:
        with suppress(FileNotFoundError):
            os.unlink(folder / MANIFEST)
        remove_files_except(folder, ())
        # The lock file goes last: until then no other process can begin to write here.
        os.unlink(folder / LOCK)
        os.rmdir(folder)
    finally:
        os.close(lock)


def prune(root: Path, keep_nbytes: int) -> list[StoreSummary]:
    """Removes the least recently used stores until all together take at most `keep_nbytes`.

    Keeps stores that are in use or whose folder has other files. Returns the removed stores.
    """
    found = sorted(stores(root), key=lambda store: store.last_used)
    nbytes, removed = sum(store.nbytes for store in found), []
    for store in found:
        if nbytes <= keep_nbytes:
            break
        with suppress(StoreInUse, BadStore):
            remove(store.folder)
            removed.append(store)
            nbytes -= store.nbytes
    return removed


def _summary(folder: Path) -> StoreSummary:
    complete, manifest = _manifest(folder)
    recipe = None if manifest is None else manifest.recipe
    return StoreSummary(folder, disk_nbytes(folder), recipe, complete, (folder / LOCK).stat().st_mtime)


def _manifest(folder: Path) -> tuple[bool, Manifest | None]:
    """(whether the store is complete, its manifest or that of the files finished so far)."""
    for name in (MANIFEST, PROGRESS):
        with suppress(FileNotFoundError, BadStore):
            return name == MANIFEST, read_manifest(folder / name)
    return False, None


def disk_nbytes(folder: Path) -> int:
    """The bytes of the folder's files; 0 if the folder does not exist."""
    if not folder.is_dir():
        return 0
    return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder))


# The free bytes that `--disk auto` leaves on the disk; half of what is free where that is less, for small models.
RESERVE_NBYTES = 10 << 30
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20))


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """What the disk of one root has left for prepared weights.

    `free_nbytes` are free on the disk. `wanted` is the user's ceiling for all stores together; where it is None, the
    reserve stays free. `stores` are the bytes of every store by its folder's name.
    """

    free_nbytes: int
    wanted: int | None
    stores: Mapping[str, int]

    @classmethod
    def of(cls, root: Path, wanted: int | None) -> Self:
        """As the disk of `root` is now; the folder need not exist."""
        return cls(disk_free(root), wanted, {store.name: store.nbytes for store in stores(root)})

    @property
    def new_nbytes(self) -> int:
        """Bytes that may still be written; below 0 where more is taken than a ceiling allows."""
        if self.wanted is None:
            return max(self.free_nbytes - RESERVE_NBYTES, self.free_nbytes // 2)
        return min(self.free_nbytes, self.wanted - sum(self.stores.values()))

    def for_store(self, name: str) -> int:
        """Bytes that the store in the folder `name` may take in all, with what it has already."""
        return max(0, self.new_nbytes + self.stores.get(name, 0))


def disk_budget(folder: Path, store_nbytes: int, wanted: int | None) -> int:
    """The bytes that all stores beside `folder`, and a store of `store_nbytes` in it, may take together.

    `wanted` is the user's limit. None means auto: as much as this store needs, with the reserve left free on the disk.
    Files that an earlier run wrote to `folder` count as part of this store. Raises OutOfBudget, which says what
    would fit.
    """
    space = DiskSpace.of(folder.parent, wanted)
    begun = disk_nbytes(folder)
    # A folder that was given by name may hold a store whose lock is not there yet.
    space = replace(space, stores={**space.stores, folder.name: begun})
    others = sum(space.stores.values()) - begun
    allowed = space.for_store(folder.name)
    if store_nbytes <= allowed:
        return others + store_nbytes if wanted is None else wanted
    raise OutOfBudget(_refusal(folder, store_nbytes, allowed, others, wanted))


def _refusal(folder: Path, store_nbytes: int, allowed: int, others: int, wanted: int | None) -> str:
    reserve = f"the disk, with {_size(RESERVE_NBYTES)} or half of it left free,"
    bound = reserve if wanted is None else f"--disk {_size(wanted)}"
    advice = "choose a smaller weight format, or a --disk-dir on a larger disk"
    if wanted is not None:
        advice = f"raise --disk to {_size(others + store_nbytes, up=True)}, or {advice}"
    if others:
        advice = f"remove other stores, which take {_size(others)} (`moedge models prune`), {advice}"
    return f"{folder.name} takes {_size(store_nbytes, up=True)} but {bound} allows {_size(allowed)}; {advice}"


def disk_of(folder: Path) -> int:
    """What tells the file system of a folder, which need not exist, from others."""
    return os.stat(nearest_existing(folder)).st_dev


def disk_free(folder: Path) -> int:
    """Free bytes of the disk of a folder, which need not exist."""
    return shutil.disk_usage(nearest_existing(folder)).free


def _size(nbytes: int, up: bool = False) -> str:
    """A size for a message. Rounds limits down and needs (`up`) up, so that the sizes of an advice work as given."""
    unit, size = next(((unit, size) for unit, size in _UNITS if nbytes >= size / 10), ("KiB", 1 << 10))
    hundredths = 100 * (-nbytes if up else nbytes) // size
    return f"{abs(hundredths) / 100:.2f} {unit}"
