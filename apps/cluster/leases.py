"""Which worker of a cluster has which row: every row is answered once, however often workers die. Torch-free."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...face import Suspicion

# A row that is computed twice at the end of a job, so that nobody waits for the slowest worker, has this many holders.
_MOST_HOLDERS = 2


@dataclass(slots=True)
class _Lessee:
    """A worker: the rows that it has, in the order in which it got them, and those that others were faster with.

    `alone` is a row that it runs with no other beside it.
    """

    rows: dict[int, None] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    alone: int | None = None


class LeaseTable:
    """Rows that were added are open until their first commit; workers are known by numbers that are never used again.

    A row of a worker that died is leased again. Two crashes with the same row, and it runs alone; a crash while it is
    alone, and it is condemned, for the caller to commit its error. A death from outside blames no row.
    """

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._waiting: deque[int] = deque()
        self._isolated: deque[int] = deque()
        self._holders: dict[int, list[int]] = {}
        self._workers: dict[int, _Lessee] = {}
        self._suspicions: dict[int, Suspicion] = {}

    @property
    def num_open(self) -> int:
        """Rows without a commit."""
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        """Open rows that no worker has."""
        return sum(row in self._open for row in (*self._waiting, *self._isolated))

    def add(self, rows: Iterable[int]) -> None:
        """Rows to be leased, behind those that wait. Raises ValueError for one that is open already."""
        for row in rows:
            if row in self._open:
                raise ValueError(f"row {row} is open already")
            self._open.add(row)
            self._waiting.append(row)

    def held(self, worker: int) -> Sequence[int]:
        """The open rows that a worker has."""
        return tuple(self._workers[worker].rows) if worker in self._workers else ()

    def lease(self, worker: int, most: int, last: bool = False) -> Sequence[int]:
        """Up to `most` rows for a worker to compute beside those that it has.

        `last`: no more rows will be added, so that a worker without any computes some of another's once more.
        """
        lessee = self._workers.setdefault(worker, _Lessee())
        if lessee.alone is not None or most < 1:
            return []
        if not lessee.rows and not self._next_waiting() and (row := self._pop(self._isolated)) is not None:
            lessee.alone = row
            return self._give(worker, [row])
        rows: list[int] = []
        while len(rows) < most and (row := self._pop(self._waiting)) is not None:
            rows.append(row)
        if not rows and last and not lessee.rows:
            rows = self._others_rows(most)
        return self._give(worker, rows)

    def only_holder(self, row: int) -> int | None:
        """The worker that has a row, if no other one has it, too."""
        holders = self._holders.get(row, [])
        return holders[0] if len(holders) == 1 else None

    def dropped(self, worker: int) -> Sequence[int]:
        """Rows of a worker that others have answered since the last call."""
        lessee = self._workers.get(worker)
        if lessee is None:
            return ()
        dropped, lessee.dropped = lessee.dropped, []
        return dropped

    def commit(self, row: int, worker: int | None = None) -> bool:
        """Whether this is the first answer of a row, the only one that counts; `worker`, dead or alive, brings it."""
        if row not in self._open:
            return False
        self._open.remove(row)
        self._suspicions.pop(row, None)
        for holder in self._holders.pop(row, ()):
            lessee = self._workers[holder]
            del lessee.rows[row]
            if lessee.alone == row:
                lessee.alone = None
            if holder != worker:
                lessee.dropped.append(row)
        return True

    def release(self, worker: int, crashed: bool = False) -> dict[int, Suspicion]:
        """A worker is gone, and its rows are for others. `crashed`: one of them may be to blame.

        Returns those that are condemned: nobody gets them any more, and the caller commits them.
        """
        lessee, condemned = self._workers.pop(worker, _Lessee()), {}
        # Backwards, so that they are leased in the order in which they were.
        for row in reversed(lessee.rows):
            self._holders[row].remove(worker)
            suspicion = self._suspicions.get(row, Suspicion())
            if crashed and (lessee.alone == row or not suspicion.isolated):
                self._suspicions[row] = suspicion
                suspicion.count()
            if suspicion.condemned:
                condemned[row] = suspicion
            elif not self._holders[row]:
                del self._holders[row]
                (self._isolated if suspicion.isolated else self._waiting).appendleft(row)
        return condemned

    def _next_waiting(self) -> bool:
        while self._waiting and self._waiting[0] not in self._open:
            self._waiting.popleft()
        return bool(self._waiting)

    def _pop(self, rows: deque[int]) -> int | None:
        """The next one that is open: an answer may have come from a worker that was taken for dead."""
        while rows:
            if (row := rows.popleft()) in self._open:
                return row
        return None

    def _give(self, worker: int, rows: Sequence[int]) -> Sequence[int]:
        for row in rows:
            self._holders.setdefault(row, []).append(worker)
            self._workers[worker].rows[row] = None
        return rows

    def _others_rows(self, most: int) -> list[int]:
        """Half of what the worker with most rows got last, which it may not have begun."""
        busy = [lessee for lessee in self._workers.values() if lessee.alone is None]
        single = ([row for row in each.rows if len(self._holders[row]) < _MOST_HOLDERS] for each in busy)
        rows = max(single, key=len, default=[])
        return rows[len(rows) // 2 :][:most]
