"""Which rows to suspect when a process died of its work, how to find the one that kills, and when to give it up."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_DEATHS_BEFORE_ISOLATION = 2


class Ending(StrEnum):
    """How the last process of a job ended, as its successor found it.

    OUTSIDE is a death without a trace, such as `kill -9`: it says nothing about the rows that were in work.
    """

    NONE = "none"
    CRASH = "crash"
    OUTSIDE = "outside"
    POWER = "power"


@dataclass(slots=True)
class Suspicion:
    """Crashes of processes that had this row in work; `alone` counts those while it was run alone on purpose."""

    deaths: int = 0
    alone: int = 0

    def count(self) -> None:
        self.alone += self.isolated
        self.deaths += 1

    @property
    def isolated(self) -> bool:
        """Whether the row runs with no other."""
        return self.deaths >= _DEATHS_BEFORE_ISOLATION

    @property
    def condemned(self) -> bool:
        """Whether the row becomes an error row: it killed when nothing else could have."""
        return self.alone > 0

    def __str__(self) -> str:
        return f"{self.deaths} processes crashed with this row in work, the last of them with no other"
