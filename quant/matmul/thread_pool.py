"""A fork-join pool of threads that compute in parallel, each with a share of torch's threads. Knows no products."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from itertools import islice
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Generic, TypeVar

import torch

Job = TypeVar("Job")
Task = Callable[[], None]


class WorkerPool:
    """Runs independent jobs on `size` threads, including the calling thread.

    Torch splits each operation among its threads and then waits for all of them. A small operation ends before the last
    thread has woken up, and a product of a few rows takes longer to synchronize than to compute; whole jobs in parallel
    synchronize once. Torch releases Python's lock while it computes, so Python threads are enough.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._tasks: tuple[SimpleQueue[Task | None], ...] = tuple(SimpleQueue() for _ in range(size - 1))
        self._outcomes: SimpleQueue[BaseException | None] = SimpleQueue()
        for tasks in self._tasks:
            Thread(target=_serve, args=(tasks, self._outcomes), name="moedge-worker", daemon=True).start()
        weakref.finalize(self, _stop_workers, self._tasks)

    def run(self, jobs: Iterable[Job], work: Callable[[Job, int], None], deterministic: bool = False) -> None:
        """Calls work(job, worker) for every job, in order; `worker` is the index of the thread, 0 for the caller's.

        Each thread that is free takes the next job; the iterator `jobs` may wait for jobs that are running. A thread
        uses torch's number of threads, divided by the number of threads that have a job if `jobs` has a length, else by
        `size`. With `deterministic` it uses one, so that a job is computed by the same kernels whatever the number of
        jobs and threads. Raises what a job raised, once all threads are idle.
        """
        waiting = _Queue(jobs)
        if waiting.is_empty:
            return
        num_threads = torch.get_num_threads()
        active = min(self.size, len(jobs)) if isinstance(jobs, Sized) else self.size
        share = 1 if deterministic else max(1, num_threads // active)
        for worker in range(1, active):
            self._tasks[worker - 1].put(partial(_take_jobs, waiting, work, worker, share))
        try:
            _take_jobs(waiting, work, 0, share)
        finally:
            # Whatever happened, no worker may still use the caller's tensors.
            outcomes = [self._outcomes.get() for _ in range(1, active)]
            torch.set_num_threads(num_threads)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    def call_on_all(self, call: Task) -> None:
        """Calls `call` on every thread at once. It computes without torch: the threads' settings stay as they are.

        Raises what a call raised, once all have ended.
        """
        for tasks in self._tasks:
            tasks.put(call)
        try:
            call()
        finally:
            outcomes = [self._outcomes.get() for _ in self._tasks]
        for outcome in outcomes:
            if outcome is not None:
                raise outcome


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """While entered, torch computes with `count` threads. This is cheap: no thread is started or ended."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Queue(Generic[Job]):
    """An iterator of jobs that several threads take from."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._jobs = iter(jobs)
        self._lock = Lock()
        self._first = list(islice(self._jobs, 1))
        self._stopped = False

    @property
    def is_empty(self) -> bool:
        """Whether there is no job at all; ask before any is taken."""
        return not self._first

    def take(self) -> list[Job]:
        """A list with the next job, or an empty list if none is left."""
        with self._lock:
            if self._stopped:
                return []
            first, self._first = self._first, []
            return first or list(islice(self._jobs, 1))

    def stop(self) -> None:
        """No thread gets another job."""
        self._stopped = True


def _take_jobs(waiting: _Queue[Job], work: Callable[[Job, int], None], worker: int, share: int) -> None:
    """The part of one worker in a run: it takes jobs until none is left."""
    # Each thread has its own number of torch threads and its own inference mode, which writing some tensors needs.
    torch.set_num_threads(share)
    with torch.inference_mode():
        try:
            while taken := waiting.take():
                work(taken[0], worker)
        except BaseException:
            waiting.stop()
            raise


def _serve(tasks: SimpleQueue[Task | None], outcomes: SimpleQueue[BaseException | None]) -> None:
    while (task := tasks.get()) is not None:
        error: BaseException | None = None
        try:
            task()
        except BaseException as raised:
            error = raised
        # A task refers to the caller's tensors: it must not outlive its run.
        del task
        outcomes.put(error)


def _stop_workers(tasks: tuple[SimpleQueue[Task | None], ...]) -> None:
    for queue in tasks:
        queue.put(None)
