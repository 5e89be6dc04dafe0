"""Saves what is whole in a damaged journal; rows whose answer is not whole are computed again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ....offload.atomic_file import AtomicFile, rename
from ...settings.errors import BadJournal
from .record import decode_done, frame, printed_crc, salvage
from .state import refuse_version

_EXTENDS = re.compile(rb'\{"kind":"extend"')


@dataclass(frozen=True, slots=True)
class Repaired:
    """Rows whose answers were kept, lines of the journal that were not whole, and where the damaged journal is now."""

    rows: int
    lost: int
    damaged: Path


def repair(path: Path) -> Repaired:
    """Rewrites the journal from its intact records; the caller holds the lock of the job.

    Only the first record, those that extend it, and each row's last answer are kept: what processes did to each other
    is over. Raises BadJournal if the first record is damaged, because it holds the request, and OtherVersion.
    """
    with path.open("rb") as file:
        lost = sum(1 for _ in file) - sum(1 for _ in salvage(file))
        last = _last_answers(file)
        new = AtomicFile(path)
        try:
            _write(new, _kept(file, last))
            damaged = path.with_suffix(".damaged")
            rename(path, damaged)
            new.publish()
        except BaseException:
            new.discard()
            raise
    return Repaired(len(last), lost, damaged)


def _last_answers(file: BinaryIO) -> dict[int, int]:
    """Row to the number of the sound record that answers it last. Checks the first record."""
    last: dict[int, int] = {}
    for number, payload in enumerate(salvage(file)):
        if number == 0:
            if not payload.startswith(b'{"kind":"open"'):
                break
            # Answers in records that this version does not know would be dropped.
            refuse_version(json.loads(payload))
        if (done := decode_done(payload, with_line=False)) is not None:
            last[done.row] = number
    else:
        return last
    raise BadJournal("the first record, which describes the job, is damaged; start the job over")


def _kept(file: BinaryIO, last: dict[int, int]) -> Iterator[bytes]:
    for number, payload in enumerate(salvage(file)):
        done = decode_done(payload, with_line=False)
        if number == 0 or _EXTENDS.match(payload) or (done is not None and last[done.row] == number):
            yield payload


def _write(new: AtomicFile, payloads: Iterator[bytes]) -> None:
    crc = 0
    for payload in payloads:
        # Offsets of the old file mean nothing in the new one, which is on disk as a whole.
        head, _, rest = payload.partition(b'"synced":')
        line = frame(head + b'"synced":0' + rest.lstrip(b"0123456789"), crc)
        new.write(line)
        crc = printed_crc(line) or 0
