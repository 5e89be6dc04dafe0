"""Why a job does not start: its input cannot be read as a file, or its output must not be written."""

from __future__ import annotations


class InputUnreadable(Exception):
    """The input is missing, no regular file, or not permitted."""


class OutputRefused(Exception):
    """OUT cannot be written where it is asked for."""


class OutputExists(OutputRefused):
    """OUT or its error file is there already; neither is ever overwritten."""


class InputRefused(Exception):
    """A line of the input is malformed and the job is strict; the message is the pre-flight's report."""
