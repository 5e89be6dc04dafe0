"""What applications may use of the core: jobs as they are on disk, and how numbers are written. Torch-free.

An application (`apps/`) imports these names and those of `moedge`, and nothing else (tests/house/test_apps.py).
"""

from __future__ import annotations

from ...offload.atomic_file import own_name, write_atomically
from ...offload.budget import GIB, gib
from ..documents.status import DocumentsJob, find_documents
from ..documents.table import MOST_LACKING
from ..jobs.folder import JobFolder
from ..jobs.journal.journal import read_answer
from ..jobs.journal.run_log import LoggedRun, read_runs
from ..jobs.journal.state import Counts, JobState
from ..jobs.outputs import OutputPaths
from ..jobs.status import JobStatus, find_job
from ..settings.formatting import duration, escape_controls, formats_line, short_duration

__all__ = [
    "Counts",
    "DocumentsJob",
    "GIB",
    "JobFolder",
    "JobState",
    "JobStatus",
    "LoggedRun",
    "MOST_LACKING",
    "OutputPaths",
    "duration",
    "escape_controls",
    "find_documents",
    "find_job",
    "formats_line",
    "gib",
    "own_name",
    "read_answer",
    "read_runs",
    "short_duration",
    "write_atomically",
]
