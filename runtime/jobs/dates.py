"""Wall-clock time for people who read a journal; nothing is decided by it."""

from __future__ import annotations

from datetime import UTC, datetime


def now_text() -> str:
    """ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
