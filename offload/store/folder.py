"""What may lie in a store's folder, and the way back to an empty one. Knows names and order, not contents."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from ..atomic_file import TEMPORARY_SUFFIX, sync_folder
from ..errors import BadStore
from .access import LOCK, refuse_untrusted
from .manifest import MANIFEST, PROGRESS, Manifest, is_file_name, is_note_name, read_manifest


def make_folder(folder: Path) -> None:
    """Readable by its owner only. Raises BadStore for a folder that holds anything but a store."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    refuse_untrusted(os.stat(folder), folder)
    store_files(folder)


def store_files(folder: Path) -> list[str]:
    """All names in the folder. Raises BadStore if one is not a store's: it may be dear to somebody."""
    names = sorted(os.listdir(folder))
    for name in names:
        plain = name.removeprefix(".").removesuffix(TEMPORARY_SUFFIX)
        if plain not in {LOCK, MANIFEST, PROGRESS} and not is_file_name(plain) and not is_note_name(plain):
            raise BadStore(f"{folder} holds {name!r}, wanted nothing but a store's files; choose another folder")
    return names


def begun_manifest(folder: Path, empty: Manifest) -> Manifest:
    """The finished or begun manifest that lies there if it is of the same making, else `empty`, others removed."""
    for name in (MANIFEST, PROGRESS):
        try:
            found = read_manifest(folder / name)
            if found.same_making(empty):
                return found
        except FileNotFoundError:
            continue
        except BadStore:
            # Damaged or of another version: it goes like one of another making.
            pass
        os.unlink(folder / name)
        # Before any file it names goes: a store that still opens is whole.
        sync_folder(folder)
    return empty


def remove_files_except(folder: Path, kept: Collection[str]) -> None:
    """The lock stays too: it is held."""
    for name in store_files(folder):
        if name not in kept and name != LOCK:
            os.unlink(folder / name)
    sync_folder(folder)
