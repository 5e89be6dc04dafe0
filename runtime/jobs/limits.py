"""When a job stops before its end, because it was told to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from .refusals import BadLimit


def steady() -> float:
    """Seconds that go on in a suspended machine, and do not jump with the wall clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@dataclass(frozen=True, slots=True)
class Limits:
    """As the user said them: a time of day, rows of this run, failed rows of the job as a number or a share of all."""

    until: str | None = None
    max_rows: int | None = None
    max_failures: str | None = None

    def seconds_until(self, now: datetime) -> float | None:
        """From `now` to the next time that clocks show `until`. Raises BadLimit."""
        if self.until is None:
            return None
        try:
            wanted = datetime.strptime(self.until, "%H:%M").time()
        except ValueError:
            raise BadLimit(f"--until {self.until} is no time of day; give hours and minutes, such as 07:00") from None
        local = now.astimezone()
        # Of naive times, so that the day on which clocks change has its own length.
        days = (datetime.combine(local.date() + timedelta(days=day), wanted).astimezone() for day in range(3))
        return min((at - local).total_seconds() for at in days if at > local)

    def failures(self, num_rows: int) -> int | None:
        """How many rows may fail. Raises BadLimit."""
        if self.max_failures is None:
            return None
        text = self.max_failures.removesuffix("%")
        if not text.replace(".", "", 1).isdecimal() or ("." in text and text == self.max_failures):
            raise BadLimit(f"--max-failures {self.max_failures} is neither a number of rows nor a share: 10, or 5%")
        return int(text) if text == self.max_failures else int(float(text) * num_rows / 100)


class StopRule:
    """Limits of one run, from the moment it is made. `clock` counts seconds and never goes back. Raises BadLimit."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = steady) -> None:
        seconds = limits.seconds_until(datetime.now())
        limits.failures(1)
        self._limits = limits
        self._clock = clock
        self._deadline = None if seconds is None else clock() + seconds

    def reason(self, num_failed: int, num_rows: int) -> str | None:
        """Why to stop now; None to go on."""
        if self._deadline is not None and self._clock() >= self._deadline:
            return f"it is {self._limits.until}"
        allowed = self._limits.failures(num_rows)
        if allowed is not None and num_failed > allowed:
            return f"{num_failed:,} rows failed, at most {allowed:,} may"
        return None
