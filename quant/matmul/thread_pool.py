"""Threads that compute side by side, each with a share of torch's own threads. Knows no products."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from itertools import islice
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Generic, TypeVar

import torch

Job = TypeVar("Job")
Order = Callable[[], None]


class WorkerPool:
    """Runs independent jobs on `size` threads, the calling one among them.

    Torch splits one operation among its threads and waits for all of them after each. A small operation ends before
    the last thread has woken up, and a product of a few rows spends more on meeting than on computing; whole jobs side
    by side meet once. Torch releases Python's lock while it computes, so Python threads are enough.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._orders: tuple[SimpleQueue[Order | None], ...] = tuple(SimpleQueue() for _ in range(size - 1))
        self._reports: SimpleQueue[BaseException | None] = SimpleQueue()
        for orders in self._orders:
            Thread(target=_serve, args=(orders, self._reports), name="moedge-crew", daemon=True).start()
        weakref.finalize(self, _dismiss, self._orders)

    def run(self, jobs: Iterable[Job], work: Callable[[Job, int], None], steady: bool = False) -> None:
        """Calls work(job, member) for every job, first ones first; member counts the threads from 0, the caller's.

        Jobs are taken one by one, by whichever thread is free, and `jobs` may wait for what others do meanwhile.
        Each thread has torch's threads divided by those that have a job, where `jobs` says how many there are, else by
        `size`; with `steady` one, so that a job meets the same kernels whatever the number of jobs and of threads.
        Raises what a job raised, once all threads are idle.
        """
        waiting = _Queue(jobs)
        if waiting.is_empty:
            return
        num_threads = torch.get_num_threads()
        active = min(self.size, len(jobs)) if isinstance(jobs, Sized) else self.size
        share = 1 if steady else max(1, num_threads // active)
        for member in range(1, active):
            self._orders[member - 1].put(_Order(waiting, work, member, share))
        try:
            _Order(waiting, work, 0, share)()
        finally:
            # Whatever happened here, nobody is left at work on the caller's tensors.
            reports = [self._reports.get() for _ in range(1, active)]
            torch.set_num_threads(num_threads)
        for report in reports:
            if report is not None:
                raise report


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """While inside, torch computes with `count` threads. Costs next to nothing: no thread starts or ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Queue(Generic[Job]):
    """Jobs that several threads take from one iterator."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._jobs = iter(jobs)
        self._lock = Lock()
        self._first = list(islice(self._jobs, 1))
        self._stopped = False

    @property
    def is_empty(self) -> bool:
        """Before any was taken."""
        return not self._first

    def take(self) -> list[Job]:
        """One job, or none where none is left."""
        with self._lock:
            if self._stopped:
                return []
            first, self._first = self._first, []
            return first or list(islice(self._jobs, 1))

    def stop(self) -> None:
        """Nobody takes another."""
        self._stopped = True


class _Order:
    """A member's part of a run: jobs, until none waits."""

    def __init__(self, waiting: _Queue[Job], work: Callable[[Job, int], None], member: int, share: int) -> None:
        self._waiting = waiting
        self._work = work
        self._member = member
        self._share = share

    def __call__(self) -> None:
        # Threads are counted per thread, and so is the mode in which the caller's tensors may be written.
        torch.set_num_threads(self._share)
        with torch.inference_mode():
            try:
                while taken := self._waiting.take():
                    self._work(taken[0], self._member)
            except BaseException:
                self._waiting.stop()
                raise


def _serve(orders: SimpleQueue[Order | None], reports: SimpleQueue[BaseException | None]) -> None:
    while (order := orders.get()) is not None:
        error: BaseException | None = None
        try:
            order()
        except BaseException as raised:
            error = raised
        # An order holds the caller's tensors: it must not outlive its run.
        del order
        reports.put(error)


def _dismiss(orders: tuple[SimpleQueue[Order | None], ...]) -> None:
    for queue in orders:
        queue.put(None)
