"""What the runtime refuses, and why. Every message says what was found, what was wanted and what to do."""

from __future__ import annotations


class UnsupportedModel(Exception):
    """The checkpoint is one that moedge cannot run (yet), or one that it must not touch."""


class SettingError(Exception):
    """A requested setting cannot be applied to this model or machine."""


class DoesNotFit(Exception):
    """The model or the job needs more memory than it was given."""


class MemoryGaveOut(Exception):
    """Memory gave out in spite of the plan, and there is nothing left to give up for it."""


class ModelNotFound(Exception):
    """There is no checkpoint under that name, here or on the hub."""


class MissingExtra(Exception):
    """A package of an optional extra is needed and not installed."""


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


class BadJournal(Exception):
    """The journal is damaged where it had been safely on disk, or is none."""


class OtherVersion(Exception):
    """The journal was written by a moedge whose format this one does not know."""


class JournalFailed(Exception):
    """The disk refused to keep the journal; what it had confirmed before is safe, and the job can go on later."""
