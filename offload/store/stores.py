"""All stores under one root: what is there, and what may go. Knows folders and times of use; opens no shard."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from ..errors import BadStore, OutOfBudget, StoreInUse
from .access import LOCK, lock_to_write
from .folder import remove_files_except, store_files
from .manifest import MANIFEST, PROGRESS, Manifest, canonical, read_manifest

_MAX_NAME_LENGTH = 60
_HASH_DIGITS = 12


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """A store that may be finished, begun or damaged; `recipe` is None where that cannot be read.

    `nbytes` is what it takes on disk now, `last_used` seconds since 1970.
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
    return user_cache_path("moedge") / "stores"


def store_folder(root: Path, model: str, fingerprint: str, recipe: Mapping[str, Any]) -> Path:
    """The folder of that making: the model's name as far as it is readable, and a hash of the rest."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip(".-")[-_MAX_NAME_LENGTH:].strip(".-")
    digest = sha256(canonical([fingerprint, recipe])).hexdigest()[:_HASH_DIGITS]
    return root / f"{readable or 'model'}-{digest}"


def stores(root: Path) -> list[StoreSummary]:
    """By name; folders that are no store, or belong to somebody else, are passed over."""
    if not root.is_dir():
        return []
    return [_summary(folder) for folder in sorted(root.iterdir()) if (folder / LOCK).is_file()]


def remove(folder: Path) -> None:
    """Raises StoreInUse while anybody uses or writes it, BadStore if the folder holds anything but a store."""
    if not (folder / LOCK).is_file():
        raise BadStore(f"{folder} is no store: no file {LOCK!r} in it; `moedge models ls` names those there are")
    store_files(folder)
    lock = lock_to_write(folder)
    try:
        with suppress(FileNotFoundError):
            os.unlink(folder / MANIFEST)
        remove_files_except(folder, ())
        # The lock's name goes last: until then nobody else can begin to write here.
        os.unlink(folder / LOCK)
        os.rmdir(folder)
    finally:
        os.close(lock)


def prune(root: Path, keep_nbytes: int) -> list[StoreSummary]:
    """Removes the stores that were not used for longest until all together take at most `keep_nbytes`.

    Those in use stay, and those with files of somebody else in them. Returns what was removed.
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
    """(whether the store is finished, its manifest or that of the files finished so far)."""
    for name in (MANIFEST, PROGRESS):
        with suppress(FileNotFoundError, BadStore):
            return name == MANIFEST, read_manifest(folder / name)
    return False, None


def disk_nbytes(folder: Path) -> int:
    """What the folder's files take; 0 where there is none."""
    if not folder.is_dir():
        return 0
    return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder))


# What `auto` leaves to everybody else on that disk.
RESERVE_NBYTES = 10 << 30
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20))


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """What the disk of one root has left for prepared weights.

    `free_nbytes` are free on the disk, less the reserve where `wanted`, the user's ceiling for all stores together, is
    None. `stores` are the bytes of every store by its folder's name.
    """

    free_nbytes: int
    wanted: int | None
    stores: Mapping[str, int]

    @classmethod
    def of(cls, root: Path, wanted: int | None) -> DiskSpace:
        """As the disk of `root` is now; the folder need not exist."""
        free = disk_free(root) - (RESERVE_NBYTES if wanted is None else 0)
        return cls(free, wanted, {store.name: store.nbytes for store in stores(root)})

    @property
    def new_nbytes(self) -> int:
        """Bytes that may still be written; below 0 where more is taken than is allowed."""
        if self.wanted is None:
            return self.free_nbytes
        return min(self.free_nbytes, self.wanted - sum(self.stores.values()))

    def for_store(self, name: str) -> int:
        """Bytes that the store in the folder `name` may take in all, with what it has already."""
        return max(0, self.new_nbytes + self.stores.get(name, 0))


def disk_budget(folder: Path, store_nbytes: int, wanted: int | None) -> int:
    """Bytes that the stores beside `folder`, and a store of `store_nbytes` in it, may take together.

    `wanted` is the user's ceiling, None for auto: what this store needs, leaving RESERVE_NBYTES of the disk free.
    What an earlier run finished in `folder` counts as this store's. Raises OutOfBudget, saying what would fit.
    """
    space = DiskSpace.of(folder.parent, wanted)
    begun = disk_nbytes(folder)
    # A folder that was given by name may hold a store whose lock is not there yet.
    space = replace(space, stores={**space.stores, folder.name: begun})
    others = sum(space.stores.values()) - begun
    room = space.for_store(folder.name)
    if store_nbytes <= room:
        return others + store_nbytes if wanted is None else wanted
    raise OutOfBudget(_refusal(folder, store_nbytes, room, others, wanted))


def _refusal(folder: Path, store_nbytes: int, room: int, others: int, wanted: int | None) -> str:
    bound = f"the disk, {_size(RESERVE_NBYTES)} of it left free," if wanted is None else f"--disk {_size(wanted)}"
    advice = "choose a smaller weight format, or a --disk-dir on a larger disk"
    if wanted is not None:
        advice = f"raise --disk to {_size(others + store_nbytes, up=True)}, or {advice}"
    if others:
        advice = f"remove other stores, which take {_size(others)} (`moedge models prune`), {advice}"
    return f"{folder.name} takes {_size(store_nbytes, up=True)} and {bound} has room for {_size(room)}; {advice}"


def disk_of(folder: Path) -> int:
    """What tells the file system of a folder, which need not exist, from others."""
    return os.stat(_existing(folder)).st_dev


def disk_free(folder: Path) -> int:
    """Free bytes of the disk of a folder, which need not exist."""
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def _size(nbytes: int, up: bool = False) -> str:
    """Room is rounded down and need up, so that the numbers in a refusal work when they are typed in."""
    unit, size = next(((unit, size) for unit, size in _UNITS if nbytes >= size / 10), ("KiB", 1 << 10))
    hundredths = 100 * (-nbytes if up else nbytes) // size
    return f"{abs(hundredths) / 100:.2f} {unit}"
