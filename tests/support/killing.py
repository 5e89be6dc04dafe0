"""Processes that are killed at a chosen instant, for tests/matrix/kills.py."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable


def start(work: Callable[[], object]) -> int:
    """The id of a process that does `work` and ends. Forked, so before torch has a thread of its own."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return process


def finish(work: Callable[[], object]) -> None:
    """Does `work` in a process that nobody kills."""
    if status := os.waitpid(start(work), 0)[1]:
        raise SystemExit(f"a process failed with status {status}")


def killed(work: Callable[[], object], after: float) -> bool:
    """Whether the process was killed `after` seconds; else it had ended by itself."""
    process = start(work)
    time.sleep(after)
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"a process failed with status {status}")
    return os.WIFSIGNALED(status)
