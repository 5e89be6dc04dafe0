"""Why a journal cannot be used, or cannot be written any further."""

from __future__ import annotations


class BadJournal(Exception):
    """The journal is damaged where it had been safely on disk, or is none."""


class OtherVersion(Exception):
    """The journal was written by a moedge whose format this one does not know."""


class JournalFailed(Exception):
    """The disk refused to keep the journal; what it had confirmed before is safe, and the job can go on later."""
