"""What can be wrong with a store. Every message says what was found, what was wanted and what to do."""

from __future__ import annotations


class BadStore(Exception):
    """A folder that is no finished, sound store of this version; nothing of it was used."""


class StoreInUse(Exception):
    """Another process writes the store, or uses it while it was to be written or removed."""


class DiskFull(Exception):
    """The disk filled up while a store was written; finished files are kept and the next run continues."""
