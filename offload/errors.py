"""What can be wrong with bytes and the places that hold them."""

from __future__ import annotations


class BadCheckpoint(Exception):
    """A checkpoint's files are missing, damaged or not what they claim; no weight of it was used."""


class OutOfBudget(Exception):
    """More bytes were asked of a tier than its budget holds."""
