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
