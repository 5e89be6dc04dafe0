"""A machine whose copies, reads and compute run in the order that a seed draws.

The code under test is the real one: Ring, ShardStream, ReaderLane, CudaLane, StagedLane. Replaced are what they stand
on: CUDA's streams and events (a stream is a queue of operations, an event the completion of one), the reader threads
(their real `_fetch`, on threads that pass one baton around), the disk, and memory (cells that hold a page's name).
Copies, reads and compute take two steps each, so that torn ones show; slots are poisoned before they are given back.
Every run draws two biases: how far the others run between two calls of the program, and who is preferred.
"""

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moedge.offload.device import Pinned
from moedge.offload.stream.cuda_lane import CudaLane, StagedLane
from moedge.offload.stream.reader_lane import Fetch, ReaderLane
from moedge.offload.stream.stream import ALIGNMENT, Arrival, Ring, Shard, ShardStream, StreamBroken

BIASES = (0.02, 0.2, 0.5, 0.8, 0.98)
FILE = Path("weights")
POISON = "poison"


class Race(Exception):
    """Compute read something else than its shard, or memory was touched after it was given up."""


class Deadlock(Exception):
    """Everything that could run waits for something that cannot."""


class Machine:
    """Actors that take steps: the compute stream, other streams, readers."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.haste = self.rng.choice(BIASES)
        self.bias = self.rng.choice(BIASES)
        self.actors: list[Any] = []
        self.readers: list[Reader] = []
        self.running: Reader | None = None
        self.compute = Stream(self)

    def wander(self) -> None:
        """What may happen between two calls of the program, or of a reader."""
        if self.running is not None:
            self.running.pause()
            return
        while self.rng.random() < self.haste and self.advance():
            pass

    def advance(self) -> bool:
        able = [actor for actor in self.actors if actor.able()]
        if not able:
            return False
        movers = [actor for actor in able if actor is not self.compute]
        moves = movers and (len(movers) == len(able) or self.rng.random() < self.bias)
        (self.rng.choice(movers) if moves else self.compute).advance()
        return True

    def run_until(self, reached: Callable[[], bool]) -> None:
        if self.running is not None:
            self.running.pause(reached)
            return
        while not reached():
            if not self.advance():
                raise Deadlock("nothing can move")


@dataclass
class Completion:
    done: bool = False


class Stream:
    """A queue of steps; a Completion in it is waited for."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.steps: deque[Completion | Callable[[], None]] = deque()
        machine.actors.append(self)

    def able(self) -> bool:
        while self.steps and isinstance(self.steps[0], Completion) and self.steps[0].done:
            self.steps.popleft()
        return bool(self.steps) and not isinstance(self.steps[0], Completion)

    def advance(self) -> None:
        step = self.steps.popleft()
        assert not isinstance(step, Completion)
        step()

    def wait_event(self, event: "Event") -> None:
        self.machine.wander()
        if event.latest is not None:  # CUDA's rule: a wait on an event that was not recorded is no wait
            self.steps.append(event.latest)

    def synchronize(self) -> None:
        self.machine.run_until(lambda: not self.able() and not self.steps)


class Event:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.latest: Completion | None = None

    def record(self, stream: Stream) -> None:
        self.machine.wander()
        completion = self.latest = Completion()
        stream.steps.append(lambda: setattr(completion, "done", True))

    def query(self) -> bool:
        return self.latest is None or self.latest.done

    def synchronize(self) -> None:
        completion = self.latest
        if completion is not None:
            self.machine.run_until(lambda: completion.done)

    def elapsed_time(self, end: "Event") -> float:
        assert self.query()
        assert end.query()
        return 1.0


class Cuda:
    """What the code under test takes for `torch.cuda`; pins up to `pin_limit` bytes."""

    def __init__(self, machine: Machine, pin_limit: float = float("inf")) -> None:
        self.machine = machine
        self.pin_limit = pin_limit
        self.registered: dict[int, int] = {}
        self.stale_error = False
        self._current = machine.compute

    def Stream(self) -> Stream:
        return Stream(self.machine)

    def Event(self, enable_timing: bool = False) -> Event:
        return Event(self.machine)

    def current_stream(self) -> Stream:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if sum(self.registered.values()) + nbytes > self.pin_limit:
            self.stale_error = True
            return 2
        assert not any(at < address + nbytes and address < at + size for at, size in self.registered.items())
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def clear_error(self) -> None:
        self.stale_error = False


class Memory:
    """Pages that hold the name of the page they are a copy of."""

    def __init__(self, cuda: Cuda, nbytes: int, file: Path | None = FILE) -> None:
        self.cuda = cuda
        self.nbytes = nbytes
        self.cells: list[Any] = [(file, page) for page in range(-(-nbytes // ALIGNMENT))]
        self.freed = False

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, run: slice) -> "Run":
        return Run(self, *run.indices(self.nbytes)[:2])


@dataclass
class Run:
    """Bytes [begin, end) of a memory, as a tensor or a memoryview would show them."""

    memory: Memory
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, run: slice) -> "Run":
        first, last, _ = run.indices(len(self))
        return Run(self.memory, self.begin + first, self.begin + last)

    @property
    def pages(self) -> range:
        return range(self.begin // ALIGNMENT, -(-self.end // ALIGNMENT))

    def read(self) -> list[Any]:
        return [self._cells[page] for page in self.pages]

    def write(self, half: int, content: list[Any]) -> None:
        middle = len(self.pages) // 2
        for index in range(middle) if half == 0 else range(middle, len(self.pages)):
            self._cells[self.pages[index]] = content[index]

    def copy_(self, source: "Run", non_blocking: bool) -> None:
        assert len(self) == len(source)
        stream = self.memory.cuda.current_stream()
        stream.machine.wander()
        stream.steps += [lambda: self.write(0, source.read()), lambda: self.write(1, source.read())]
        if not non_blocking:
            stream.synchronize()

    @property
    def _cells(self) -> list[Any]:
        if self.memory.freed:
            raise Race("memory was touched after it was given up")
        return self.memory.cells


class Disk:
    """A Source whose reads are interrupted half way."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def read(self, buffer: Run, offset: int, nbytes: int) -> None:
        target = buffer[:nbytes]
        content = [(FILE, offset // ALIGNMENT + index) for index in range(len(target.pages))]
        target.write(0, content)
        self.machine.wander()
        target.write(1, content)

    def close(self) -> None:
        pass


class Stopped(BaseException):
    """Unwinds a reader whose run is over."""


class Reader:
    """A thread that runs only while it holds the baton, and gives it back wherever a real one may be interrupted."""

    def __init__(self, lane: "Readers") -> None:
        self.lane = lane
        self.machine = lane.machine
        self.until: Callable[[], bool] = lambda: True
        self.fetching = False
        self.stopping = False
        self.error: BaseException | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.machine.actors.append(self)

    def able(self) -> bool:
        return self.until() if self.fetching else bool(self.lane._chunks)

    def advance(self) -> None:
        if not self._thread.ident:
            self._thread.start()
        before, self.machine.running = self.machine.running, self
        self._go.release()
        self._back.acquire()
        self.machine.running = before
        if self.error is not None:
            raise self.error

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        """Called on the reader's own thread."""
        self.until = until
        self._back.release()
        self._go.acquire()
        if self.stopping:
            raise Stopped

    def stop(self) -> None:
        if self._thread.ident:
            self.stopping = True
            self._go.release()
            self._thread.join()

    def _work(self) -> None:
        self._go.acquire()
        while not self.stopping:
            self.fetching = True
            try:
                self.lane.fetch_next()
            except Stopped:
                return
            except BaseException as error:
                self.error = error
            self.fetching = False
            self._back.release()
            self._go.acquire()


class Readers(ReaderLane):
    """The real lane; its two threads run when the machine lets them."""

    def __init__(self, machine: Machine, memory: Any) -> None:
        super().__init__({FILE: Disk(machine)}, memory, num_threads=0, chunk_nbytes=2 * ALIGNMENT)  # type: ignore[dict-item]
        self.machine = machine
        self.readers = [Reader(self), Reader(self)]
        machine.readers += self.readers

    def fetch_next(self) -> None:
        self._fetch(*self._chunks.popleft())

    def wait(self, ready: Fetch) -> None:
        self.machine.wander()
        self.machine.run_until(lambda: ready.query() or self._failure is not None)
        super().wait(ready)

    def close(self) -> None:
        """Joining threads, as the real one does."""
        self.fail(StreamBroken("closed"))
        self.machine.run_until(lambda: not any(reader.fetching for reader in self.readers))


@dataclass(frozen=True)
class Parts:
    """The classes that a run is built of; a bug replaces one."""

    ring: type[Ring] = Ring
    stream: type[ShardStream[Any]] = ShardStream
    readers: type[Readers] = Readers
    copies: type[CudaLane] = CudaLane
    staged: type[StagedLane] = StagedLane


@dataclass
class Outcome:
    """What a run did; a run that did nothing proves nothing."""

    num_arrived: int = 0
    nbytes_moved: int = 0
    memories: list[Memory] = field(default_factory=list)


class Trial:
    """Random shards through one random ring, computed on by a consumer that holds up to three arrivals.

    It asks for some ahead, and now and then takes back what has not begun, to ask for others.
    """

    def __init__(self, seed: int, tiers: str, parts: Parts) -> None:
        self.machine = Machine(seed)
        self.rng = self.machine.rng
        self.cuda = Cuda(self.machine)
        self.parts = parts
        self.tiers = tiers
        self.shards = self._shards()
        self.coming: deque[Shard] = deque()
        self.memories: list[Memory] = []
        self.stream = {"host": self._host, "device": self._device, "staged": self._staged}[tiers]()

    def run(self) -> Outcome:
        num_arrivals = self.rng.randint(1, 4 * len(self.shards))
        most_ahead = self.rng.randint(1, 2 * len(self.shards))
        most_held = self.rng.randint(1, 3)
        held: deque[Arrival[Run]] = deque()
        for _ in range(num_arrivals):
            self._ask(most_ahead)
            arrival = self._next(held)
            if arrival.shard is not self.coming.popleft():
                raise Race("a shard came out of turn")
            self._compute(arrival)
            held.append(arrival)
            while len(held) >= most_held or (held and self.rng.random() < 0.3):
                self._give_back(held)
        self.stream.close()
        for memory in self.memories:
            memory.freed = True
        self.machine.run_until(lambda: not any(actor.able() for actor in self.machine.actors))
        return Outcome(self.stream.num_arrived, self.stream.lane.nbytes_moved, self.memories)

    def _ask(self, most_ahead: int) -> None:
        if self.rng.random() < 0.15:
            recalled = self.stream.recall()
            kept = len(self.coming) - len(recalled)
            if kept < 0 or list(self.coming)[kept:] != recalled:
                raise Race("something else was taken back than was asked for last")
            self.coming = deque(list(self.coming)[:kept])
        while not self.coming or (len(self.coming) < most_ahead and self.rng.random() < 0.8):
            shards = [self.rng.choice(self.shards) for _ in range(self.rng.randint(1, 2))]
            self.coming.extend(shards)
            self.stream.ask(*shards)
            self.machine.wander()

    def _next(self, held: deque[Arrival[Run]]) -> Arrival[Run]:
        self.machine.wander()
        while True:
            try:
                return self.stream.next()
            except ValueError as error:
                if not held or "does not fit" not in str(error):
                    raise
                self._give_back(held)

    def _give_back(self, held: deque[Arrival[Run]]) -> None:
        arrival = held.popleft()
        self._compute(arrival)
        self._on_compute(lambda: arrival.view.write(0, [POISON] * 99))
        self._on_compute(lambda: arrival.view.write(1, [POISON] * 99))
        self.stream.done(arrival)
        self.machine.wander()

    def _compute(self, arrival: Arrival[Run]) -> None:
        first = arrival.shard.offset // ALIGNMENT
        wanted = [(arrival.shard.file, first + index) for index in range(len(arrival.view.pages))]

        def look() -> None:
            if (found := arrival.view.read()) != wanted:
                raise Race(f"{arrival.shard.name}: compute read {found}, wanted {wanted}")

        self._on_compute(look)
        self._on_compute(look)

    def _on_compute(self, step: Callable[[], None]) -> None:
        """On the host compute is synchronous: it is done when it returns."""
        if self.tiers == "host":
            step()
        else:
            self.machine.compute.steps.append(step)
        self.machine.wander()

    def _shards(self) -> list[Shard]:
        shards, page = [], {FILE: 0, None: 0}
        for index in range(self.rng.randint(2, 6)):
            pages = self.rng.randint(1, 5)
            file = {"host": FILE, "device": None}.get(self.tiers) or self.rng.choice([FILE, FILE, None])
            file = None if self.tiers == "device" else file
            nbytes = pages * ALIGNMENT - self.rng.choice([0, 0, 1000])
            shards.append(Shard(f"shard {index}", nbytes, page[file] * ALIGNMENT, file))
            page[file] += pages
        return shards

    def _ring(self, shards: list[Shard]) -> tuple[Ring, Memory]:
        largest = max(-(-shard.nbytes // ALIGNMENT) for shard in shards)
        nbytes = self.rng.randint(largest, 3 * largest) * ALIGNMENT
        memory = Memory(self.cuda, nbytes)
        memory.cells = [POISON] * len(memory.cells)
        self.memories.append(memory)
        return self.parts.ring(nbytes), memory

    def _host(self) -> ShardStream[Run]:
        ring, memory = self._ring([shard for shard in self.shards if shard.file is not None])
        return self.parts.stream(self.parts.readers(self.machine, memory), ring, memory)

    def _copies(self, host: Memory, memory: Memory) -> CudaLane:
        self.memories.append(host)
        address = (1 << 40) + sum(self.cuda.registered.values())
        pinned = Pinned(self.cuda, address, host.nbytes, self.cuda.clear_error)
        return self.parts.copies(self.cuda, host, pinned, memory)

    def _slab(self) -> Memory:
        return Memory(self.cuda, sum(shard.nbytes + ALIGNMENT for shard in self.shards), None)

    def _device(self) -> ShardStream[Run]:
        ring, memory = self._ring(self.shards)
        return self.parts.stream(self._copies(self._slab(), memory), ring, memory)

    def _staged(self) -> ShardStream[Run]:
        ring, memory = self._ring(self.shards)
        direct = self._copies(self._slab(), memory)
        if all(shard.file is None for shard in self.shards):
            return self.parts.stream(direct, ring, memory)
        host = self._host()
        staging = self._copies(self.memories[-1], memory)
        lane = self.parts.staged(host, staging, direct, lambda shard: shard.file is None)
        return self.parts.stream(lane, ring, memory)


def run(seed: int, tiers: str, parts: Parts | None = None) -> Outcome:
    trial = Trial(seed, tiers, parts or Parts())
    try:
        return trial.run()
    finally:
        for reader in trial.machine.readers:
            reader.stop()
