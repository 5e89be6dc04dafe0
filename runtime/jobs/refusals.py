"""Why a job does not start or go on: its input cannot be used, its output must not be written, it is another job."""

from __future__ import annotations


class InputUnreadable(Exception):
    """The input is missing, no regular file, or not permitted."""


class OutputRefused(Exception):
    """OUT cannot be written where it is asked for."""


class OutputExists(OutputRefused):
    """OUT or its error file is there already; neither is ever overwritten."""


class InputRefused(Exception):
    """A line of the input is malformed and the job is strict; the message is the pre-flight's report."""


class InputChanged(Exception):
    """The input is not what it was when the job began."""


class JobMismatch(Exception):
    """The job that this output belongs to was begun with something else, which would change answers."""


class JobInUse(Exception):
    """Another process works on the job."""


class JobNotFound(Exception):
    """There is no job of that name."""


class BadLimit(Exception):
    """A limit of a run that cannot be understood."""


class ExportFailed(Exception):
    """The disk refused an output file; nothing that was answered is lost."""
