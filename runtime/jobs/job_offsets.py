"""The key offsets that a job was begun with: beside its journal, so that a resume under any budget uses the same."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ...offload.store.errors import BadStore
from ..shape.model_shape import ModelShape
from ..weights.key_offsets import KeyOffsets, keep, kept
from .refusals import JobMismatch

NAME = "key_offsets"


def recall(folder: Path, recorded: str | None, shape: ModelShape) -> KeyOffsets | None:
    """Those that the journal names; None where it names none, or where they are gone and have to be found again."""
    if recorded is None:
        return None
    try:
        offsets = kept(folder, shape)
    except BadStore:
        return None
    return offsets if offsets is not None and offsets.digest == recorded else None


def settle(
    folder: Path, recorded: str | None, offsets: KeyOffsets | None, accepted: Collection[str] = ()
) -> str | None:
    """What to record; keeps the offsets. Raises JobMismatch where the job was begun with others.

    They are measured where weights compute, so that another device, or a store made elsewhere, may bring others.
    """
    found = None if offsets is None else offsets.digest
    if recorded not in (None, found) and NAME not in accepted:
        raise JobMismatch(
            f"{folder} was begun with other key offsets, and its own copy of them is gone:\n  {NAME}: was {recorded}, "
            f"is {found}\nResume it with the model, the store and the device that it was begun with, choose another "
            f"output, or go on all the same with --accept-drift {NAME}"
        )
    if offsets is not None and found != recorded:
        keep(folder, offsets)
    return found
