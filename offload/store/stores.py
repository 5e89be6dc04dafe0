"""All stores under one root: what is there, and what may go. Knows folders and times of use; opens no shard."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from .errors import BadStore, StoreInUse
from .folder import remove_files_except, store_files
from .lock import LOCK, lock_to_write
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
