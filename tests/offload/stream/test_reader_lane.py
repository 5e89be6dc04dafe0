"""Reader threads bring the right bytes under any timing; every way they can fail reaches the one who waits."""

import ctypes
import errno
import fcntl
import mmap
import os
import random
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moedge.offload.stream import reader_lane
from moedge.offload.stream.reader_lane import (
    DirectFile,
    HostBytes,
    ReaderLane,
    Source,
    ThreadBuffer,
    UnalignedFile,
)
from moedge.offload.stream.stream import ALIGNMENT, Ring, Shard, ShardPart, ShardStream, Slot, StreamBroken

FILE = Path("weights")
SIZES = [3 * ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT - 100, 5 * ALIGNMENT, 17]
BEGINS = [sum(-(-size // ALIGNMENT) * ALIGNMENT for size in SIZES[:index]) for index in range(len(SIZES))]
CONTENT = random.Random(0).randbytes(BEGINS[-1] + ALIGNMENT)
NUM_CHUNKS = 8
SOON = 5.0


class Interrupted:
    """A source that does something before each read: wait, raise, kill."""

    def __init__(self, before: Callable[[int], object], source: Source | None = None) -> None:
        self.before = before
        self.source = source or HostBytes(memoryview(CONTENT))
        self.num_reads = 0
        self.num_ended = 0
        self.is_closed = False

    def read(self, target: memoryview, offset: int, nbytes: int) -> None:
        assert not self.is_closed
        index, self.num_reads = self.num_reads, self.num_reads + 1
        self.before(index)
        self.source.read(target, offset, nbytes)
        self.num_ended += 1

    def close(self) -> None:
        self.is_closed = True
        self.source.close()


def schedule(file: Path = FILE, **fields: int) -> list[Shard]:
    pairs = zip(SIZES, BEGINS, strict=True)
    return [Shard(f"s{index}", size, begin, file, **fields) for index, (size, begin) in enumerate(pairs)]


Opened = tuple[ShardStream[memoryview], ReaderLane]


def open_stream(
    source: Source, num_threads: int = 2, pages: int = 9, shards: list[Shard] | None = None, asks: bool = True
) -> Opened:
    memory = memoryview(mmap.mmap(-1, pages * ALIGNMENT))
    shards = shards or schedule()
    assert shards[0].file is not None
    lane = ReaderLane({shards[0].file: source}, memory, num_threads, 2 * ALIGNMENT)
    stream = ShardStream(lane, Ring(len(memory)), memory)
    if asks:
        stream.ask(*shards)
    return stream, lane


def check(stream: ShardStream[memoryview], num_shards: int) -> None:
    for arrival in stream.cycle(num_shards):
        begin = arrival.shard.offset
        assert arrival.view == CONTENT[begin : begin + arrival.shard.nbytes], arrival.shard


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader-")]


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_lane, "RETRY_SECONDS", (0.0, 0.0, 0.0))


@pytest.fixture
def _switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_file_streams_pass_after_pass(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(CONTENT)
    stream, _ = open_stream(DirectFile(path), shards=schedule(path))
    check(stream, 10 * len(SIZES))
    stream.close()
    assert stream.nbytes_arrived == 10 * sum(SIZES)
    assert stream.lane.nbytes_moved >= stream.nbytes_arrived
    assert stream.lane.seconds_waited >= 0


@pytest.mark.usefixtures("_switching")
@pytest.mark.parametrize("seed", range(6))
def test_the_bytes_are_right_under_any_timing_of_the_threads(seed: int) -> None:
    rng = random.Random(seed)
    naps = [rng.choice([0.0, 0.0, 0.0, 1e-5, 2e-4]) for _ in range(97)]
    source = Interrupted(lambda index: time.sleep(naps[index % 97]))
    stream, _ = open_stream(source, num_threads=1 + seed % 4, pages=rng.randint(5, 20))
    check(stream, 300)
    stream.close()
    assert source.num_reads >= 300
    assert source.is_closed


def test_the_timing_test_would_see_a_torn_shard() -> None:
    """Negative control: a shard counts as there when its first chunk is."""

    class Hasty(ReaderLane):
        def _fetch(self, fetch: reader_lane.Fetch, begin: int) -> None:
            fetch.done = True
            super()._fetch(fetch, begin)

    memory = memoryview(mmap.mmap(-1, 9 * ALIGNMENT))
    source = Interrupted(lambda index: time.sleep(0.01))
    stream = ShardStream(Hasty({FILE: source}, memory, 2, 2 * ALIGNMENT), Ring(len(memory)), memory)
    stream.ask(*schedule())
    with pytest.raises(AssertionError):
        check(stream, 10)
    stream.close()


@pytest.mark.usefixtures("_hasty")
@pytest.mark.parametrize("at", range(NUM_CHUNKS))
def test_a_passing_read_error_costs_nothing_at_any_call(at: int) -> None:
    def before(index: int) -> None:
        if at <= index < at + 3:
            raise OSError(errno.EIO, "bad sector")

    source = Interrupted(before)
    stream, _ = open_stream(source, num_threads=1)
    check(stream, len(SIZES))
    stream.close()
    assert source.num_reads >= NUM_CHUNKS + 3


@pytest.mark.usefixtures("_hasty")
@pytest.mark.parametrize("at", range(NUM_CHUNKS))
@pytest.mark.parametrize("kind", [errno.EIO, errno.ENODATA])
def test_a_lasting_read_error_is_told_with_file_offset_and_cause(at: int, kind: int) -> None:
    def before(index: int) -> None:
        if index >= at:
            raise OSError(kind, "bad sector")

    source = Interrupted(before)
    stream, _ = open_stream(source, num_threads=1)
    with pytest.raises(StreamBroken, match=r"weights: \d+ bytes at \d+ \(s\d\) could not be read: .*bad sector"):
        check(stream, len(SIZES))
    with pytest.raises(StreamBroken):
        stream.next()
    stream.close()
    assert source.num_reads == at + (4 if kind == errno.EIO else 1)


@pytest.mark.parametrize("at", range(NUM_CHUNKS))
@pytest.mark.parametrize("death", [SystemExit, KeyboardInterrupt, MemoryError])
def test_whatever_ends_a_reader_reaches_the_one_who_waits(at: int, death: type[BaseException]) -> None:
    def before(index: int) -> None:
        if index == at:
            raise death

    stream, _ = open_stream(Interrupted(before), asks=False)

    def ask_and_check() -> None:
        # The first read may have failed before all were asked for.
        stream.ask(*schedule())
        check(stream, 10 * len(SIZES))

    with pytest.raises(StreamBroken, match=death.__name__) as caught:
        ask_and_check()
    assert isinstance(caught.value.__cause__, death)
    stream.close()


def test_a_reader_killed_from_outside_is_noticed() -> None:
    stream, lane = open_stream(Interrupted(lambda index: time.sleep(0.001)), num_threads=1)
    check(stream, 3)
    ident = lane._threads[0].ident
    assert ident is not None
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit)) == 1
    with pytest.raises(StreamBroken, match="SystemExit"):
        check(stream, 100)
    stream.close()


def test_a_reader_that_ends_without_an_error_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def before(index: int) -> None:
        if index == 3:
            raise SystemExit

    stream, lane = open_stream(Interrupted(before), num_threads=1)
    fail = lane.fail
    monkeypatch.setattr(lane, "fail", lambda cause: None)
    with pytest.raises(StreamBroken, match="ended without an error"):
        check(stream, 100)
    monkeypatch.setattr(lane, "fail", fail)
    stream.close()


def test_the_second_waiter_hears_of_a_failure_too() -> None:
    gate = threading.Event()
    _, lane = opened = open_stream(Interrupted(lambda index: gate.wait()))
    heard: list[str] = []

    def wait() -> None:
        try:
            opened[0].next()
        except StreamBroken as error:
            heard.append(str(error))

    shard = schedule()[0]
    slot = Ring(9 * ALIGNMENT).try_reserve(shard.nbytes)
    assert slot is not None
    fetch = lane.start([(shard, slot)], None)

    def wait_directly() -> None:
        with pytest.raises(StreamBroken, match="stopped by a watchdog"):
            lane.wait(fetch)
        heard.append("direct")

    threads = [threading.Thread(target=target) for target in (wait, wait_directly)]
    for thread in threads:
        thread.start()
    lane.fail(TimeoutError("stopped by a watchdog"))
    for thread in threads:
        thread.join(SOON)
    assert len(heard) == 2
    gate.set()
    lane.close()


def test_a_file_cut_while_it_streams_ends_the_stream_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(CONTENT)
    stream, _ = open_stream(DirectFile(path), shards=schedule(path))
    check(stream, 3)
    os.truncate(path, ALIGNMENT)
    with pytest.raises(StreamBroken, match=rf"{path}: .*(ends at byte|changed)"):
        check(stream, 20)
    stream.close()


def test_a_damaged_shard_is_named_the_first_time_it_is_read() -> None:
    good = [zlib.crc32(CONTENT[begin : begin + size]) for begin, size in zip(BEGINS, SIZES, strict=True)]
    shards = [Shard(f"s{i}", SIZES[i], BEGINS[i], FILE, good[i]) for i in range(len(SIZES))]
    stream, lane = open_stream(HostBytes(memoryview(CONTENT)), shards=shards)
    check(stream, 2 * len(SIZES))
    assert lane._verified == set(shards)
    stream.close()
    damaged = bytearray(CONTENT)
    damaged[BEGINS[3] + 5] ^= 1
    stream, _ = open_stream(HostBytes(memoryview(damaged)), shards=shards)
    with pytest.raises(StreamBroken, match=f"s3 has checksum .* wanted {good[3]:08x}"):
        check(stream, len(SIZES))
    stream.close()


def test_a_slow_disk_is_waited_for() -> None:
    gate = threading.Event()
    stream, lane = open_stream(Interrupted(lambda index: gate.wait()))
    assert not stream.is_ready()
    assert lane.nbytes_moved == 0
    threading.Timer(0.05, gate.set).start()
    check(stream, len(SIZES))
    assert lane.seconds_waited > 0
    stream.close()


def test_a_stream_closes_at_any_instant_and_nothing_moves_afterwards() -> None:
    rng = random.Random(1)
    num_interrupted = 0
    for _ in range(500):
        source = Interrupted(lambda index: time.sleep(0.0002))
        stream, lane = open_stream(source, num_threads=rng.randint(1, 3))
        check(stream, rng.randint(0, 3))
        time.sleep(rng.random() * 0.0006)
        num_interrupted += source.num_ended < source.num_reads
        stream.close()
        assert source.is_closed, "a read after this would fail"
        assert not any(thread.is_alive() for thread in lane._threads)
    assert num_interrupted > 50


def test_a_reader_that_hangs_in_a_read_does_not_hang_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_lane, "_JOIN_SECONDS", 0.05)
    gate, inside = threading.Event(), threading.Event()
    source = Interrupted(lambda index: inside.set() or gate.wait())
    stream, lane = open_stream(source)
    assert not stream.is_ready()
    assert inside.wait(SOON)
    stream.close()
    assert not source.is_closed, "its descriptor is still being read from"
    gate.set()
    for thread in lane._threads:
        thread.join(SOON)
    lane.close()
    assert source.is_closed


def test_a_reader_waits_for_the_mark_of_its_place() -> None:
    class Point:
        def __init__(self) -> None:
            self.reached = threading.Event()

        def synchronize(self) -> None:
            assert self.reached.wait(SOON)

    source = Interrupted(lambda index: None)
    stream, _ = open_stream(source, pages=3, shards=schedule()[:1])
    arrival, point = stream.next(), Point()
    stream.done(arrival, used=point)
    stream.ask(arrival.shard)
    assert source.num_reads == 2
    assert not stream.is_ready()
    point.reached.set()
    stream.next()
    assert source.num_reads == 4
    stream.close()


def test_bytes_outside_the_memory_or_between_pages_are_refused() -> None:
    memory = memoryview(mmap.mmap(-1, 2 * ALIGNMENT))
    lane = ReaderLane({}, memory, 1)
    slot = Ring(4 * ALIGNMENT).try_reserve(3 * ALIGNMENT)
    assert slot is not None
    with pytest.raises(ValueError, match="is outside"):
        lane.start([(Shard("s", 3 * ALIGNMENT, 0), slot)], None)
    with pytest.raises(ValueError, match="multiple of 4096"):
        lane.start([(Shard("s", 10, 10), slot)], None)
    lane.close()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("shift", [0, 8, 1032, 4095])
def test_parts_at_any_offset_are_gathered_and_leave_the_rest_as_it_is(shift: int, direct: bool, tmp_path: Path) -> None:
    """Slots that begin as the bytes lie in the file are read in place, others through a buffer; both to the byte."""
    path = tmp_path / "weights"
    path.write_bytes(CONTENT)
    file = UnalignedFile(path, ThreadBuffer())
    if not direct:
        # As on a file system without direct reads.
        fcntl.fcntl(file._descriptor, fcntl.F_SETFL, os.O_RDONLY)
        file.direct = False
    generator = random.Random(shift)
    memory = memoryview(mmap.mmap(-1, 64 * ALIGNMENT))
    lane = ReaderLane({path: file}, memory, 2, 2 * ALIGNMENT)
    for _ in range(30):
        parts, at = [], 0
        for _ in range(3):
            nbytes = generator.randint(1, len(CONTENT) // 2)
            offset = generator.choice([(shift + at) % ALIGNMENT, generator.randint(0, ALIGNMENT)])
            parts.append(ShardPart(path, offset, at, nbytes))
            at += nbytes + generator.choice([0, 1, 64])
        memory[:] = bytes([7]) * len(memory)
        expected = bytearray(memory)
        for part in parts:
            begin = ALIGNMENT + shift + part.begin
            expected[begin : begin + part.nbytes] = CONTENT[part.offset : part.offset + part.nbytes]
        crc = 0
        for part in parts:
            crc = zlib.crc32(CONTENT[part.offset : part.offset + part.nbytes], crc)
        shard = Shard("parts", at, 0, path, crc, tuple(parts))
        lane.wait(lane.start([(shard, Slot(ALIGNMENT + shift, at))], None))
        assert memory == expected
    wrong = Shard("parts", at, 0, path, crc ^ 1, tuple(parts))
    with pytest.raises(StreamBroken, match="download the checkpoint again"):
        lane.wait(lane.start([(wrong, Slot(ALIGNMENT, at))], None))
    lane.close()
