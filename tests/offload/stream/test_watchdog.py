"""The watchdog tells slow from stuck, stops a stuck run once, and leaves a working one alone."""

import mmap
import threading

import pytest

from moedge.offload.stream.reader_lane import ReaderLane
from moedge.offload.stream.stream import ALIGNMENT, Ring, Shard, ShardStream, StreamBroken
from moedge.offload.stream.watchdog import Watchdog


class Run:
    def __init__(self) -> None:
        self.work = 0
        self.nbytes = 0
        self.now = 0.0
        self.stopped: list[str] = []
        self.watchdog = Watchdog(
            lambda: self.work, lambda: self.nbytes, self.stopped.append, limit_seconds=100, clock=lambda: self.now
        )

    def after(self, seconds: float) -> bool:
        self.now += seconds
        self.watchdog.check()
        return self.watchdog.stuck


def test_a_run_that_works_or_waits_for_a_slow_disk_is_left_alone() -> None:
    run = Run()
    run.watchdog.check()
    for _ in range(20):
        run.work += 1
        assert not run.after(99)
    for _ in range(20):
        run.nbytes += 1
        assert not run.after(99)
    assert not run.after(99)
    assert run.stopped == []


def test_a_stuck_run_is_stopped_once() -> None:
    run = Run()
    run.watchdog.check()
    assert not run.after(99.9)
    assert run.after(0.2)
    assert run.after(1000)
    assert len(run.stopped) == 1
    assert "no byte moved for 100 s" in run.stopped[0]


def test_time_before_it_is_entered_does_not_count() -> None:
    run = Run()
    run.watchdog.check()
    run.now += 1000
    with run.watchdog:
        assert not run.after(50)
    assert run.stopped == []


@pytest.mark.parametrize("seed", range(20))
def test_a_forced_stall_ends_as_a_broken_stream(seed: int) -> None:
    """A disk that answers `seed` reads and then no more."""
    gate = threading.Event()

    class Disk:
        num_reads = 0

        def read(self, target: memoryview, offset: int, nbytes: int) -> None:
            self.num_reads += 1
            if self.num_reads > seed:
                gate.wait()

        def close(self) -> None:
            pass

    memory = memoryview(mmap.mmap(-1, 4 * ALIGNMENT))
    lane = ReaderLane({None: Disk()}, memory, 1)
    stream = ShardStream(lane, Ring(len(memory)), memory)
    stream.ask(Shard("s", ALIGNMENT, 0))
    watchdog = Watchdog(
        lambda: stream.num_arrived, lambda: lane.nbytes_moved, lambda says: lane.fail(TimeoutError(says)), 0.05
    )
    with watchdog, pytest.raises(StreamBroken, match="nothing was computed"):
        for _ in stream.cycle(1000):
            pass
    assert watchdog.stuck
    assert stream.num_arrived <= seed
    gate.set()
    stream.close()
