"""When a job ends before its last row: limits of the user, Ctrl-C, passes that stall, and processes that crash.

A fatal signal, an error that nobody foresaw, a library that calls exit() and the kernel's OOM killer each leave a
trace, so rows that were in work are suspects. `kill -9` and a power cut leave none.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import IO, Protocol, Self

from ...offload.errors import ExitCode
from ...offload.stream.stream import StreamBroken
from ...offload.stream.watchdog import LIMIT_SECONDS, Watchdog
from ..settings.errors import BadLimit, Stalled, counted
from .folder import JobFolder
from .journal.state import Ending, JobState


def steady() -> float:
    """Seconds that also pass while the machine is suspended, and do not jump with the wall clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits as given: a time of day, rows of this run, failed rows of the job as a number or a percentage."""

    until: str | None = None
    max_rows: int | None = None
    max_failures: str | None = None

    def seconds_until(self, now: datetime) -> float | None:
        """Seconds from `now` to the next `until`. Raises BadLimit."""
        if self.until is None:
            return None
        try:
            wanted = datetime.strptime(self.until, "%H:%M").time()
        except ValueError:
            raise BadLimit(f"--until {self.until} is not a time of day; use HH:MM, such as 07:00") from None
        local = now.astimezone()
        # Of naive times, so that the day on which clocks change has its own length.
        days = (datetime.combine(local.date() + timedelta(days=day), wanted).astimezone() for day in range(3))
        return min((at - local).total_seconds() for at in days if at > local)

    def failures(self, num_rows: int) -> int | None:
        """How many rows may fail. Raises BadLimit."""
        if self.max_failures is None:
            return None
        text = self.max_failures.removesuffix("%")
        share = text != self.max_failures
        if not text.replace(".", "", 1).isdecimal() or ("." in text and not share) or (share and float(text) > 100):
            raise BadLimit(
                f"--max-failures {self.max_failures} is neither a number of rows nor 0% to 100% of them; use 10 or 5%"
            )
        return int(float(text) * num_rows / 100) if share else int(text)


class StopRule:
    """Limits of one run, from the moment it is made. `clock` counts seconds and never goes back. Raises BadLimit."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = steady) -> None:
        seconds = limits.seconds_until(datetime.now())
        limits.failures(1)
        self._limits = limits
        self._clock = clock
        self._deadline = None if seconds is None else clock() + seconds

    def reason(self, num_failed: int, num_rows: int) -> str | None:
        """Why to stop now; None to continue."""
        if self._deadline is not None and self._clock() >= self._deadline:
            return f"--until {self._limits.until}"
        allowed = self._limits.failures(num_rows)
        if allowed is not None and num_failed > allowed:
            return f"{counted(num_failed, 'row')} failed, --max-failures allows {allowed:,}"
        return None


class DeferredInterrupt:
    """While open, Ctrl-C makes `requested` true; pressed again, it raises KeyboardInterrupt.

    Leaving it without an error then raises KeyboardInterrupt. Other threads than the main one are never interrupted,
    and a handler of the caller's own stays in force.
    """

    def __init__(self) -> None:
        self.requested = False
        self._installed = False

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.requested and kind is None:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


# Seconds that the passes have to notice a failed read; after that, nothing else would end the process.
GRACE_SECONDS = 0.8


class WeightSource(Protocol):
    """The source of weights during passes."""

    @property
    def nbytes_moved(self) -> int:
        """Grows while bytes move."""

    def fail(self, cause: BaseException) -> None:
        """Everyone who waits for bytes gets an error from now on."""


class StallGuard:
    """While entered, passes are watched. `reason` is set once they stall; then they are made to end."""

    def __init__(
        self,
        work: Callable[[], int],
        weights: WeightSource,
        stacks: Path,
        limit_seconds: float = LIMIT_SECONDS,
        end_process: Callable[[int], None] = os._exit,
    ) -> None:
        """`stacks` is the file that says where every thread was."""
        self.reason: str | None = None
        self._weights = weights
        self._stacks = stacks
        self._end_process = end_process
        self._left = threading.Event()
        self._watchdog = Watchdog(work, lambda: weights.nbytes_moved, self._stop, limit_seconds)

    def __enter__(self) -> Self:
        self._stacks.unlink(missing_ok=True)
        self._watchdog.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._left.set()
        self._watchdog.__exit__(kind, error, None)
        if self.reason is not None:
            raise Stalled(f"{self.reason}; {self._stacks} shows the stack of each thread") from error

    def watched(self, passes: Iterator[None]) -> Generator[None]:
        """The passes; saves an error of the weight stream with the stacks of all threads."""
        try:
            yield from passes
        except StreamBroken as error:
            self._record(error)
            raise

    def _record(self, error: BaseException) -> None:
        if self.reason is None:
            self._dump()
        with self._stacks.open("a") as file:
            file.write("\n" + "".join(traceback.format_exception(error)))

    def _dump(self) -> None:
        with self._stacks.open("w") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)

    def _stop(self, reason: str) -> None:
        """On the watching thread."""
        self._dump()
        self.reason = reason
        self._weights.fail(TimeoutError(reason))
        if not self._left.wait(GRACE_SECONDS):
            # The passes hang in a call that no exception reaches. What the journal has is on disk; leave.
            print(f"moedge: {reason}; {self._stacks} shows the stack of each thread", file=sys.__stderr__, flush=True)
            self._end_process(ExitCode.STOPPED)


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
        self._file: IO[bytes] | None = None
        self._before = faulthandler.is_enabled()

    def __enter__(self) -> Self:
        for left in self._path.parent.glob(JobFolder.ALIVE):
            left.unlink(missing_ok=True)
        self._alive.touch()
        _unlink_in_exit(self._alive.resolve())
        self._file = self._path.open("wb", buffering=0)
        faulthandler.enable(self._file)
        return self

    def keep(self, trace: str) -> None:
        """Keeps the marker with the trace of an unexpected error, which ends the process like a signal."""
        if self._file is not None:
            self._file.write(trace.encode(errors="replace"))
        self._kept = True

    def __exit__(self, *error: object) -> None:
        faulthandler.disable()
        if self._before and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)
        if self._file is not None:
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
