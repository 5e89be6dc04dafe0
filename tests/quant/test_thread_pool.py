"""Jobs run once each, side by side, and leave the caller's threads as they were."""

import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from moedge.quant.matmul.thread_pool import WorkerPool

PATIENCE = 30


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("num_jobs", [0, 1, 3, 50])
def test_every_job_runs_once(size: int, num_jobs: int) -> None:
    pool, done = WorkerPool(size), Counter[int]()
    for _ in range(3):
        done.clear()
        pool.run(range(num_jobs), lambda job, worker: done.update([job]))
        assert done == Counter(range(num_jobs))


def test_jobs_run_at_the_same_time_in_threads_of_their_own() -> None:
    meeting, workers = threading.Barrier(3, timeout=PATIENCE), set[tuple[int, int]]()

    def meet(job: int, worker: int) -> None:
        meeting.wait()
        workers.add((worker, threading.get_ident()))

    WorkerPool(3).run(range(3), meet)
    assert {worker for worker, _ in workers} == {0, 1, 2}
    assert len({thread for _, thread in workers}) == 3


@pytest.mark.parametrize(("deterministic", "shares"), [(False, {4}), (True, {1})])
def test_threads_are_shared_out_and_given_back(deterministic: bool, shares: set[int]) -> None:
    before, found = torch.get_num_threads(), set[int]()
    try:
        torch.set_num_threads(4)
        WorkerPool(2).run([1], lambda job, worker: found.add(torch.get_num_threads()), deterministic)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert found == shares


@pytest.mark.parametrize("culprit", [0, 1])
def test_what_a_job_raises_arrives_and_the_pool_works_on(culprit: int) -> None:
    pool, meeting = WorkerPool(2), threading.Barrier(2, timeout=PATIENCE)
    threads = torch.get_num_threads()

    def fail(job: int, worker: int) -> None:
        meeting.wait()
        if worker == culprit:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pool.run(range(2), fail)
    assert torch.get_num_threads() == threads
    done: list[int] = []
    pool.run([7], lambda job, worker: done.append(job))
    assert done == [7]


def test_jobs_may_wait_for_jobs_that_are_under_way() -> None:
    done, waiting = threading.Event(), threading.Event()

    def jobs() -> Iterator[int]:
        yield 0
        waiting.set()
        assert done.wait(PATIENCE), "nobody works while a job is waited for"
        yield 1

    def work(job: int, worker: int) -> None:
        if job == 0:
            assert waiting.wait(PATIENCE), "nobody asks for the next job meanwhile"
            done.set()

    WorkerPool(2).run(jobs(), work)


@pytest.mark.parametrize("size", [1, 3])
def test_what_jobs_raise_arrives_and_the_pool_works_on(size: int) -> None:
    def jobs() -> Iterator[int]:
        yield 0
        raise ZeroDivisionError

    pool, done = WorkerPool(size), list[int]()
    with pytest.raises(ZeroDivisionError):
        pool.run(jobs(), lambda job, worker: done.append(job))
    assert done == [0]
    pool.run([7], lambda job, worker: done.append(job))
    assert done == [0, 7]


def test_after_a_failure_nobody_takes_another_job() -> None:
    taken: list[int] = []

    def fail(job: int, worker: int) -> None:
        taken.append(job)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        WorkerPool(2).run(iter(range(1000)), fail)
    assert len(taken) <= 2


def test_tensors_of_the_caller_can_be_written_whatever_mode_they_were_made_in() -> None:
    pool = WorkerPool(2)
    with torch.inference_mode():
        inference = torch.zeros(4)
    for out in (inference, torch.zeros(4)):
        pool.run(range(4), lambda job, worker, out=out: out[job].fill_(job))
        assert out.tolist() == [0, 1, 2, 3]


def test_threads_end_with_their_pool() -> None:
    pool = WorkerPool(3)
    threads = [thread for thread in threading.enumerate() if thread.name == "moedge-worker"]
    before = len(threads)
    del pool
    for thread in threads[-2:]:
        thread.join(PATIENCE)
    assert sum(thread.is_alive() for thread in threads) <= before - 2
