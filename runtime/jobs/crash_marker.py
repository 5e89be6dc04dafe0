"""How the last process of a job ended: told by what it left behind, before a new one begins.

A fatal signal, an error that nobody foresaw, a library that calls exit() and the kernel's memory killer each leave a
trace, so rows that were in work are suspects. `kill -9` and a power cut leave none.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import sys
from pathlib import Path
from typing import IO

from .folder import JobFolder
from .journal.state import Ending, JobState

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_VMSTAT = Path("/proc/vmstat")


def boot_id() -> str:
    """Differs after every start of the machine; empty where the system does not say."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else ""


def memory_kills() -> int:
    """How many processes the kernel has killed for want of memory since it started."""
    lines = _VMSTAT.read_text().splitlines() if _VMSTAT.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def last_ending(state: JobState, folder: JobFolder) -> Ending:
    """NONE where it stopped by itself, or where there was none."""
    started = state.started
    if not state.running or started is None:
        return Ending.NONE
    if started["boot"] != boot_id():
        return Ending.POWER
    traced = folder.trace.is_file() and folder.trace.stat().st_size > 0
    exited = not folder.alive(started["pid"]).exists()
    return Ending.CRASH if traced or exited or memory_kills() > started["memory_kills"] else Ending.OUTSIDE


class CrashMarker:
    """While open, the death of this process leaves a trace in the job's folder, unless it comes from outside."""

    def __init__(self, folder: JobFolder) -> None:
        self._path = folder.trace
        self._alive = folder.alive(os.getpid())
        self._kept = False

    def __enter__(self) -> CrashMarker:
        for left in self._path.parent.glob(JobFolder.ALIVE):
            left.unlink(missing_ok=True)
        self._alive.touch()
        _unlink_in_exit(self._alive.resolve())
        self._file: IO[bytes] = self._path.open("wb", buffering=0)
        self._before = faulthandler.is_enabled()
        faulthandler.enable(self._file)
        return self

    def keep(self, trace: str) -> None:
        """An error that nobody foresaw ends the process as surely as a signal."""
        self._file.write(trace.encode(errors="replace"))
        self._kept = True

    def __exit__(self, *error: object) -> None:
        faulthandler.disable()
        if self._before and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)
        self._file.close()
        if not self._kept:
            self._path.unlink(missing_ok=True)
        self._alive.unlink(missing_ok=True)


def _unlink_in_exit(path: Path) -> None:
    """Has the C library remove `path` in exit(), where no Python runs any more; `kill -9` runs nothing."""
    libc = ctypes.CDLL(None)
    libc.strdup.restype = ctypes.c_void_p
    # A copy that is never freed: it is read when nothing of this object is left.
    name = ctypes.c_void_p(libc.strdup(os.fsencode(path)))
    libc.__cxa_atexit(libc.unlink, name, None)
