"""Every row is committed once, whatever workers do: the table of leases against a model of what it promises."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from moedge.apps.cluster.leases import LeaseTable


class Leases(RuleBasedStateMachine):
    """Workers come, lease, answer, die and answer after their death; rows are added meanwhile."""

    workers = Bundle("workers")
    dead = Bundle("dead")

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.num_rows = self.num_workers = 0
        self.open: set[int] = set()
        self.condemned: set[int] = set()
        self.held: dict[int, set[int]] = {}
        self.had: dict[int, set[int]] = {}
        self.crashes: Counter[int] = Counter()
        self.commits: Counter[int] = Counter()

    @rule(count=st.integers(1, 12))
    def add(self, count: int) -> None:
        rows = range(self.num_rows, self.num_rows + count)
        self.table.add(rows)
        self.open |= set(rows)
        self.num_rows += count

    @rule(target=workers)
    def join(self) -> int:
        self.num_workers += 1
        self.held[self.num_workers] = self.had[self.num_workers] = set()
        self.had[self.num_workers] = set()
        return self.num_workers

    @rule(worker=workers, most=st.integers(0, 6), last=st.booleans())
    def lease(self, worker: int, most: int, last: bool) -> None:
        rows = self.table.lease(worker, most, last)
        assert len(rows) == len(set(rows)) <= most
        assert set(rows) <= self.open - self.held[worker] - self.condemned
        others = set().union(*(held for each, held in self.held.items() if each != worker))
        if not last:
            # Twice only where nobody will add rows.
            assert not set(rows) & others
        if any(self.crashes[row] >= 2 for row in rows):
            assert len(rows) == 1
            assert not self.held[worker]
        self.held[worker] |= set(rows)
        self.had[worker] |= set(rows)

    @rule(worker=workers, data=st.data())
    def commit(self, worker: int, data: st.DataObject) -> None:
        if self.had[worker]:
            self._commit(data.draw(st.sampled_from(sorted(self.had[worker]))), worker)

    @rule(worker=dead, data=st.data())
    def commit_late(self, worker: int, data: st.DataObject) -> None:
        if self.had[worker]:
            self._commit(data.draw(st.sampled_from(sorted(self.had[worker]))), worker)

    def _commit(self, row: int, worker: int) -> None:
        first = self.table.commit(row, worker)
        assert first == (row in self.open)
        self.commits[row] += first
        self.open.discard(row)
        for each, held in self.held.items():
            if row in held and first:
                held.discard(row)
                assert (row in self.table.dropped(each)) == (each != worker)

    @rule(target=dead, worker=consumes(workers), crashed=st.booleans())
    def die(self, worker: int, crashed: bool) -> int:
        held = self.held.pop(worker)
        found = self.table.release(worker, crashed)
        assert set(found) <= held
        if crashed:
            self.crashes.update(held)
        assert all(self.crashes[row] > 2 for row in found)
        assert crashed or not found
        self.condemned |= set(found)
        return worker

    @rule(target=dead)
    def shrink_to_nothing(self) -> int:
        for worker in list(self.held):
            self.held[worker] = set()
            assert not self.table.release(worker)
        return multiple()

    @invariant()
    def every_row_is_somewhere(self) -> None:
        assert self.table.num_open == len(self.open)
        held = set().union(*self.held.values())
        assert self.table.num_waiting == len(self.open - held - self.condemned)
        assert max(self.commits.values(), default=0) <= 1
        for worker, rows in self.held.items():
            assert set(self.table.held(worker)) == rows

    def teardown(self) -> None:
        """Whatever happened, one new worker answers every row that is left."""
        for worker in self.held:
            self.table.release(worker)
        for row in self.condemned & self.open:
            assert self.table.commit(row)
            self.commits[row] += 1
        for _ in range(2 * self.num_rows + 1):
            for row in self.table.lease(10**6, 5, last=True):
                assert self.table.commit(row, 10**6)
                self.commits[row] += 1
        assert self.table.num_open == 0
        assert self.commits == Counter(range(self.num_rows))


Leases.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLeases = Leases.TestCase


def test_the_rows_of_a_dead_worker_are_leased_again_in_their_order() -> None:
    table = LeaseTable()
    table.add(range(6))
    assert table.lease(1, 3) == [0, 1, 2]
    table.commit(1, 1)
    assert table.release(1) == {}
    assert table.lease(2, 9) == [0, 2, 3, 4, 5]


def test_a_row_that_crashes_workers_runs_alone_and_is_condemned_by_a_crash_there() -> None:
    table = LeaseTable()
    table.add(range(3))
    for worker in (1, 2):
        assert 1 in table.lease(worker, 3)
        table.commit(0, worker)
        table.commit(2, worker)
        assert table.release(worker, crashed=True) == {}
    table.add([3])
    assert table.lease(3, 5) == [3]
    # It does not start beside another row.
    assert table.lease(3, 5) == []
    table.commit(3, 3)
    assert table.lease(3, 5) == [1]
    assert table.lease(3, 5, last=True) == []
    (condemned,) = table.release(3, crashed=True).items()
    assert condemned[0] == 1
    assert condemned[1].condemned
    assert table.lease(4, 5) == []
    assert table.commit(1)


def test_deaths_from_outside_blame_no_row() -> None:
    table = LeaseTable()
    table.add([0, 1])
    for worker in range(50):
        assert table.lease(worker, 2) == [0, 1]
        assert table.release(worker) == {}


def test_a_worker_without_rows_takes_some_of_another_at_the_end_and_the_first_answer_counts() -> None:
    table = LeaseTable()
    table.add(range(4))
    assert table.lease(1, 4) == [0, 1, 2, 3]
    assert table.lease(2, 4) == []
    assert table.lease(2, 4, last=True) == [2, 3]
    assert table.commit(3, 2)
    assert not table.commit(3, 1)
    assert table.dropped(1) == [3]
    assert table.dropped(1) == []
    table.release(2)
    assert [table.commit(row, 1) for row in (0, 1, 2)] == [True] * 3


def test_a_row_is_added_once() -> None:
    table = LeaseTable()
    table.add([0])
    with pytest.raises(ValueError, match="open already"):
        table.add([0])
