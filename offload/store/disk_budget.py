"""Whether one more store fits the disk budget, which bounds all stores of a root together."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..errors import OutOfBudget
from .stores import disk_nbytes, stores

# What `auto` leaves to everybody else on that disk.
RESERVE_NBYTES = 10 << 30
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20))


def disk_budget(folder: Path, store_nbytes: int, wanted: int | None) -> int:
    """Bytes that the stores beside `folder`, and a store of `store_nbytes` in it, may take together.

    `wanted` is the user's ceiling, None for auto: what this store needs, leaving RESERVE_NBYTES of the disk free.
    What an earlier run finished in `folder` counts as this store's. Raises OutOfBudget, saying what would fit.
    """
    begun = disk_nbytes(folder)
    others = sum(store.nbytes for store in stores(folder.parent) if store.folder != folder)
    free = shutil.disk_usage(_existing(folder)).free
    room_on_disk = max(0, begun + free - (RESERVE_NBYTES if wanted is None else 0))
    budget = others + store_nbytes if wanted is None else wanted
    room = min(room_on_disk, max(0, budget - others))
    if store_nbytes <= room:
        return budget
    raise OutOfBudget(_refusal(folder, store_nbytes, room, others, wanted))


def _refusal(folder: Path, store_nbytes: int, room: int, others: int, wanted: int | None) -> str:
    bound = f"the disk, {_size(RESERVE_NBYTES)} of it left free," if wanted is None else f"--disk {_size(wanted)}"
    advice = "choose a smaller weight format, or a --disk-dir on a larger disk"
    if wanted is not None:
        advice = f"raise --disk to {_size(others + store_nbytes, up=True)}, or {advice}"
    if others:
        advice = f"remove other stores, which take {_size(others)} (`moedge models prune`), {advice}"
    return f"{folder.name} takes {_size(store_nbytes, up=True)} and {bound} has room for {_size(room)}; {advice}"


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def _size(nbytes: int, up: bool = False) -> str:
    """Room is rounded down and need up, so that the numbers in a refusal work when they are typed in."""
    unit, size = next(((unit, size) for unit, size in _UNITS if nbytes >= size / 10), ("KiB", 1 << 10))
    hundredths = 100 * (-nbytes if up else nbytes) // size
    return f"{abs(hundredths) / 100:.2f} {unit}"
