"""Which files a store's folder may contain, and how they are removed. Knows names and their order, not contents."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from ..atomic_file import TEMPORARY_SUFFIX, sync_folder
from ..errors import BadStore
from .access import LOCK, refuse_untrusted
from .manifest import MANIFEST, PROGRESS, Manifest, is_file_name, is_note_name, read_manifest


def make_folder(folder: Path) -> None:
    """Creates the folder, accessible to its owner only. Raises BadStore if it contains anything but a store."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    refuse_untrusted(os.stat(folder), folder)
    store_files(folder)


def store_files(folder: Path) -> list[str]:
    """All file names in the folder. Raises BadStore if a store has no such file: it may be a file of the user."""
    names = sorted(os.listdir(folder))
    for name in names:
        plain = name.removeprefix(".").removesuffix(TEMPORARY_SUFFIX)
        if plain not in {LOCK, MANIFEST, PROGRESS} and not is_file_name(plain) and not is_note_name(plain):
            raise BadStore(f"{folder} contains {name!r}, wanted only a store's files; choose another folder")
    return names


def begun_manifest(folder: Path, empty: Manifest) -> Manifest:
    """The finished or begun manifest in the folder if it has the same inputs as `empty`, else `empty`.

    Removes all other manifests.
    """
    for name in (MANIFEST, PROGRESS):
        try:
            found = read_manifest(folder / name)
            if found.same_making(empty):
                return found
        except FileNotFoundError:
            continue
        except BadStore:
            # A damaged manifest, or one of another version, is removed like one with other inputs.
            pass
        os.unlink(folder / name)
        # The manifest goes before any file that it names: a store that can be opened is complete.
        sync_folder(folder)
    return empty


def remove_files_except(folder: Path, kept: Collection[str]) -> None:
    """Removes all other files of the store. The lock file stays, because it is held."""
    for name in store_files(folder):
        if name not in kept and name != LOCK:
            os.unlink(folder / name)
    sync_folder(folder)
