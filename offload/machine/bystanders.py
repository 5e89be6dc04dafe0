"""How busy others keep this machine's processors: what is measured beside them is no truth. Torch-free."""

from __future__ import annotations

import os
import time

import psutil

# Above this share of the processors, what is measured says little about the machine.
BUSY = 0.25


class Bystanders:
    """Watches from when it is made: processes that are neither this one nor its children."""

    def __init__(self) -> None:
        self._begun = self._now()

    def share(self) -> float:
        """Of the machine's CPU time since then, what others used: 0 to 1. Time that a hypervisor took counts."""
        busy, own, wall = (end - begun for end, begun in zip(self._now(), self._begun, strict=True))
        return min(1.0, max(0.0, (busy - own) / (wall * (os.cpu_count() or 1)))) if wall > 0 else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float]:
        of_all, times = psutil.cpu_times(), os.times()
        waiting = of_all.idle + getattr(of_all, "iowait", 0.0)
        # Guests' time is part of that of users.
        guests = getattr(of_all, "guest", 0.0) + getattr(of_all, "guest_nice", 0.0)
        own = times.user + times.system + times.children_user + times.children_system
        return sum(of_all) - waiting - guests, own, time.perf_counter()


def is_busy() -> bool:
    """Whether programs have kept more than BUSY of the processors at work in the last minute."""
    return os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)
