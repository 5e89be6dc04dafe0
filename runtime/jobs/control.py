"""What can be done to a job from outside: ask it to stop, take what is finished, mend its journal. Torch-free."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from .dates import now_text
from .export import export_partial
from .folder import JobFolder, JobLock
from .journal.journal import Journal
from .journal.repair import Repaired, repair
from .outputs import OutputPaths
from .refusals import JobInUse, OutputExists
from .status import JobStatus


def cancel(folder: JobFolder) -> str:
    """Returns what became of it, in words."""
    try:
        lock = JobLock(folder)
    except JobInUse:
        folder.cancel.touch()
        return "it stops after the pass that is running"
    with closing(lock), Journal(folder.journal) as journal:
        if journal.state.finished:
            return "it is finished; nothing was cancelled"
        journal.cancel(now_text())
    return "cancelled; `moedge jobs resume` goes on with it"


def export_now(folder: JobFolder, target: Path | None) -> str:
    """Returns what was written, in words. Raises OutputExists for a file of the user's choice that is there."""
    status = JobStatus.read(folder)
    if target is not None and os.path.lexists(target):
        raise OutputExists(f"{target} exists and is not overwritten; move it away or choose another output name")
    target = target or OutputPaths(status.output).partial
    export_partial(folder.journal, status.state, target)
    return f"{status.state.counts.rows:,} finished rows are in {target}"


def repair_journal(folder: JobFolder) -> Repaired:
    """Raises JobInUse, BadJournal."""
    with closing(JobLock(folder)):
        return repair(folder.journal)
