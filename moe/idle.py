"""How long a lane idles while it waits for a router, told in times that an expert takes. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable


class IdleTime:
    """Looks at a lane's counters, `seconds_busy` and `nbytes_moved`; an expert has `nbytes`."""

    def __init__(
        self,
        seconds_busy: Callable[[], float],
        nbytes_moved: Callable[[], int],
        nbytes: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._seconds_busy = seconds_busy
        self._nbytes_moved = nbytes_moved
        self._nbytes = nbytes
        self._clock = clock
        self._last = (clock(), seconds_busy())

    def since_last(self) -> float | None:
        """Idle time since the last call in times that an expert takes; None before anything has moved."""
        now, busy = self._clock(), self._seconds_busy()
        (began, was_busy), self._last = self._last, (now, busy)
        moved = self._nbytes_moved()
        if not moved or not busy:
            return None
        idle = max(0.0, (now - began) - (busy - was_busy))
        return idle / (busy / moved * self._nbytes)
