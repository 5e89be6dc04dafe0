"""Every wait, event and reuse rule of the stream's code, removed or moved: one small class each.

Each bug says on which tiers it shows and which class of the real code it replaces.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from moedge.offload.stream.cuda_lane import CudaLane, Event, Relay, StagedLane
from moedge.offload.stream.reader_lane import Fetch
from moedge.offload.stream.stream import Arrival, Ring, Run, Shard, ShardPart, ShardStream, Slot, SyncPoint
from support.stream.simulator import Deadlock, Parts, Race, Readers, run

Pieces = Iterable[tuple[int, Slot]]


class NoReadyWait(CudaLane):
    """compute does not wait for the copy"""

    def wait(self, ready: Event) -> None:
        pass


class NoUsedWait(CudaLane):
    """the copy does not wait for the compute that reads its slot"""

    def copy(self, pieces: Pieces, after: SyncPoint | None) -> Event:
        return super().copy(pieces, None)


class EarlyReady(CudaLane):
    """ready is recorded before the copy is asked for"""

    def copy(self, pieces: Pieces, after: SyncPoint | None) -> Event:
        ready = self._recorded(self._side)
        super().copy(pieces, after)
        return ready


class ReadyBetween(CudaLane):
    """ready is recorded when half of the bytes are asked for"""

    def copy(self, pieces: Pieces, after: SyncPoint | None) -> Event:
        every = [*pieces]
        begin, slot = every.pop()
        half = slot.nbytes // 8192 * 4096
        first = [*every, (begin, Slot(slot.offset, half))] if half else every
        ready = super().copy(first, after) if first else None
        rest = super().copy([(begin + half, Slot(slot.offset + half, slot.nbytes - half))], after)
        return ready or rest


class ReadyOnCompute(CudaLane):
    """ready is recorded on the compute stream"""

    def copy(self, pieces: Pieces, after: SyncPoint | None) -> Event:
        super().copy(pieces, after)
        return self._recorded(self._cuda.current_stream())


class UsedOnSide(CudaLane):
    """used is recorded on the side stream"""

    def mark_used(self) -> Event:
        return self._recorded(self._side)


class UsedNotRecorded(CudaLane):
    """used is never recorded, so that waiting for it is no wait"""

    def mark_used(self) -> Event:
        return self._cuda.Event()  # type: ignore[no-any-return]


class SideWaits(CudaLane):
    """the side stream waits for ready in place of compute"""

    def wait(self, ready: Event) -> None:
        self._side.wait_event(ready)


class ComputeWaits(CudaLane):
    """compute waits for used in place of the side stream"""

    def copy(self, pieces: Pieces, after: SyncPoint | None) -> Event:
        if after is not None:
            self._cuda.current_stream().wait_event(after)
        return super().copy(pieces, None)


class WaitsTooLate(CudaLane):
    """the wait for used is asked for after the copy"""

    def copy(self, pieces: Pieces, after: SyncPoint | None) -> Event:
        ready = super().copy(pieces, None)
        if after is not None:
            self._side.wait_event(after)
        return ready


class PreviousReady(CudaLane):
    """compute waits for the copy before the one it reads"""

    previous: Any = None

    def wait(self, ready: Event) -> None:
        if self.previous is not None:
            super().wait(self.previous)
        self.previous = ready


class SharedUsed(CudaLane):
    """one event object for all uses, recorded by compute and by copies"""

    shared: Any = None

    def _recorded(self, stream: Any, enable_timing: bool = False) -> Event:
        self.shared = self.shared or self._cuda.Event()
        self.shared.record(stream)
        return self.shared  # type: ignore[no-any-return]


class NewSideEachTime(CudaLane):
    """every copy waits on one side stream and runs on another"""

    def copy(self, pieces: Pieces, after: SyncPoint | None) -> Event:
        if after is not None:
            self._side.wait_event(after)
        self._side = self._cuda.Stream()
        return super().copy(pieces, None)


class CloseWithoutSide(CudaLane):
    """close does not wait for copies"""

    def close(self) -> None:
        self._cuda.current_stream().synchronize()


class CloseWithoutCompute(CudaLane):
    """close does not wait for compute"""

    def close(self) -> None:
        self._side.synchronize()


class WrongBytes(CudaLane):
    """the copy begins a page late"""

    def copy(self, pieces: Pieces, after: SyncPoint | None) -> Event:
        return super().copy([(begin + 4096 if begin else 0, slot) for begin, slot in pieces], after)


class NoMark(ShardStream[Any]):
    """the stream forgets used marks"""

    def done(self, *arrivals: Arrival[Any], used: SyncPoint | None = None) -> None:
        self.lane.mark_used = lambda: None  # type: ignore[method-assign]
        super().done(*arrivals)


class MarkOnArrival(ShardStream[Any]):
    """used is marked when the arrival is handed out"""

    mark: SyncPoint | None = None

    def next(self) -> Arrival[Any]:
        arrival = super().next()
        self.mark = self.lane.mark_used()
        return arrival

    def done(self, *arrivals: Arrival[Any], used: SyncPoint | None = None) -> None:
        super().done(*arrivals, used=used or self.mark)


class StaleMark(ShardStream[Any]):
    """a slot is reused after the mark of the slot before it"""

    stale: SyncPoint | None = None

    def done(self, *arrivals: Arrival[Any], used: SyncPoint | None = None) -> None:
        before, self.stale = self.stale, used or self.lane.mark_used()
        super().done(*arrivals, used=before or self.stale)


class FirstMark(ShardStream[Any]):
    """the first mark is kept for all later copies"""

    first: SyncPoint | None = None

    def done(self, *arrivals: Arrival[Any], used: SyncPoint | None = None) -> None:
        self.first = self.first or used or self.lane.mark_used()
        super().done(*arrivals, used=self.first)


class ReleaseBeforeMark(ShardStream[Any]):
    """copies are started into a released slot before its mark is taken"""

    def done(self, *arrivals: Arrival[Any], used: SyncPoint | None = None) -> None:
        for arrival in arrivals:
            self._live.popleft()
            self.ring.release(arrival.slot)
        self._run_ahead()
        self._used = used or self.lane.mark_used()


class ReleaseOnArrival(ShardStream[Any]):
    """a slot is released when it is handed out"""

    def next(self) -> Arrival[Any]:
        arrival = super().next()
        self.ring.release(arrival.slot)
        return arrival

    def done(self, *arrivals: Arrival[Any], used: SyncPoint | None = None) -> None:
        self._live.popleft()
        self._used = used or self.lane.mark_used()
        self._run_ahead()


class ReleaseAll(ShardStream[Any]):
    """giving one arrival back releases all that are held"""

    def done(self, *arrivals: Arrival[Any], used: SyncPoint | None = None) -> None:
        if arrivals[0] in self._live:
            self._used = used or self.lane.mark_used()
            while self._live:
                self.ring.release(self._live.popleft().slot)
            self._run_ahead()


class AnyRun(CudaLane):
    """one copy brings shards together between which others lie"""

    def copy(self, pieces: Pieces, after: SyncPoint | None) -> Event:
        every = [*pieces]
        begin, slot = every[0]
        ends = max(other.end for _, other in every)
        return super().copy([(begin, Slot(slot.offset, ends - slot.offset))], after)


class FirstOfARun(CudaLane):
    """of a run only the first shard is copied"""

    def start(self, run: Run, after: SyncPoint | None) -> Event:
        return super().start(run[:1], after)


class WaitOnce(ShardStream[Any]):
    """compute waits for the first copy of all"""

    def next(self) -> Arrival[Any]:
        arrival = super().next()
        self.lane.wait = lambda ready: None  # type: ignore[method-assign]
        return arrival


class NoWait(ShardStream[Any]):
    """an arrival is handed out without waiting"""

    def next(self) -> Arrival[Any]:
        self.lane.wait = lambda ready: None  # type: ignore[method-assign]
        return super().next()


class PreviousCopy(ShardStream[Any]):
    """an arrival is handed out when the copy before it is there"""

    previous: Any = None

    def next(self) -> Arrival[Any]:
        self._run_ahead()
        if self._ahead:
            shard, slot, ready = self._ahead[0]
            self._ahead[0], self.previous = (shard, slot, self.previous or ready), ready
        return super().next()


class CloseKeepsMoving(ShardStream[Any]):
    """close does not reach the lane"""

    def close(self) -> None:
        self._closed = True


class RecallBegun(ShardStream[Any]):
    """recall takes back a shard that has begun to move"""

    def recall(self) -> list[Shard]:
        recalled = super().recall()
        if len(self._ahead) > 1:
            shard, _, _ = self._ahead.pop()
            recalled.insert(0, shard)
        return recalled


class RecallForgets(ShardStream[Any]):
    """what was taken back comes all the same"""

    def recall(self) -> list[Shard]:
        return list(self._asked)


class RecallOne(ShardStream[Any]):
    """recall drops more than it says"""

    def recall(self) -> list[Shard]:
        return super().recall()[1:]


class AskFirst(ShardStream[Any]):
    """what is asked for last comes before what has not begun"""

    def ask(self, *shards: Shard) -> None:
        self._asked.extendleft(reversed(shards))
        self._run_ahead()


class SkipTheLarge(ShardStream[Any]):
    """a smaller shard overtakes one that does not fit"""

    def _run_ahead(self) -> None:
        super()._run_ahead()
        if len(self._asked) > 1 and self._asked[1].nbytes < self._asked[0].nbytes:
            self._asked.rotate(-1)
            super()._run_ahead()
            if self._asked:
                self._asked.rotate(1)


class UsedOnlyAtOnce(ShardStream[Any]):
    """what is asked for after a slot was given back does not wait for the slot's mark"""

    def ask(self, *shards: Shard) -> None:
        used, self._used = self._used, None
        super().ask(*shards)
        self._used = used


class NoSkip(Ring):
    """what is skipped at the ring's end counts as free"""

    def try_reserve(self, nbytes: int, shift: int = 0) -> Slot | None:
        before = self._head if self._live else 0
        slot = super().try_reserve(nbytes, shift)
        if slot is not None and slot.offset < before:
            follows, taken = self._live[-2]
            self._live[-2] = (follows, taken - (self.capacity - before))
            self._taken -= self.capacity - before
        return slot


class OneTooMany(Ring):
    """a slot is given while one page of it is still live"""

    def try_reserve(self, nbytes: int, shift: int = 0) -> Slot | None:
        self._taken -= self.alignment
        slot = super().try_reserve(nbytes, shift)
        self._taken += self.alignment
        return slot


class ReleaseYoungest(Ring):
    """release frees the size of the youngest slot"""

    def release(self, slot: Slot) -> None:
        self._taken -= self._live[-1][1] - self._live[0][1]
        super().release(slot)


class Unpadded(Ring):
    """slots are not rounded up to whole pages"""

    def _padded(self, nbytes: int) -> int:
        return super()._padded(nbytes) and nbytes


class NoWrap(Ring):
    """a slot may reach past the ring's end"""

    def try_reserve(self, nbytes: int, shift: int = 0) -> Slot | None:
        self.capacity += self.alignment
        slot = super().try_reserve(nbytes, shift)
        self.capacity -= self.alignment
        return slot


class ReadWithoutAfter(Readers):
    """a reader overwrites a host slot while it is copied to the device"""

    def _fetch(self, fetch: Fetch, begin: int) -> None:
        fetch.after = None
        super()._fetch(fetch, begin)


class ReadBeforeAfter(Readers):
    """a reader waits for the copy out of the slot only after it has read into it"""

    def _fetch(self, fetch: Fetch, begin: int) -> None:
        after, fetch.after = fetch.after, None
        super()._fetch(fetch, begin)
        if after is not None:
            after.synchronize()


class FirstChunkOnly(Readers):
    """only the first chunk of a shard waits for the slot"""

    def _fetch(self, fetch: Fetch, begin: int) -> None:
        if begin:
            fetch.after = None
        super()._fetch(fetch, begin)


class DoneAtFirstChunk(Readers):
    """a shard counts as there when one of its chunks is"""

    def _fetch(self, fetch: Fetch, begin: int) -> None:
        fetch.chunks_left = 1
        super()._fetch(fetch, begin)


class DoneBeforeRead(Readers):
    """a shard counts as there before its last chunk is read"""

    def _fetch(self, fetch: Fetch, begin: int) -> None:
        fetch.done = fetch.chunks_left == 1
        super()._fetch(fetch, begin)


class LostChunk(Readers):
    """a chunk is dropped when the lane is busy"""

    def fetch_next(self) -> None:
        if len(self._chunks) > 3:
            self._chunks.pop()
        super().fetch_next()


class NotJoined(Readers):
    """close does not wait for the threads"""

    def close(self) -> None:
        self.fail(ValueError("closed"))


class LateChunk(Readers):
    """the last chunk of a shard is read into the slot of the one before it"""

    def _read(self, fetch: Fetch, chunk: ShardPart) -> None:
        super()._read(fetch, chunk._replace(begin=max(0, chunk.begin - 8192)))


class NoHostWait(StagedLane):
    """bytes are passed on to the device before they have reached the host"""

    def _pass_on(self) -> None:
        self._host.lane.wait = lambda ready: None  # type: ignore[method-assign]
        super()._pass_on()


class PassOnEverything(StagedLane):
    """the host's arrivals are passed on whether or not they are there"""

    def _pass_on_ready(self) -> None:
        self._host.lane.wait = lambda ready: None  # type: ignore[method-assign]
        while self._waiting:
            self._pass_on()


class HostAskedTwice(StagedLane):
    """a shard that waited for its turn is asked from the disk again"""

    def _pass_on_ready(self) -> None:
        super()._pass_on_ready()
        if len(self._waiting) > 2:
            self._host.ask(self._waiting[0].shard)


class HostNotAsked(StagedLane):
    """the disk is asked for a shard only when the one before it has been passed on"""

    def start(self, run: Run, after: SyncPoint | None) -> Relay:
        asked = self._host.ask
        if self._waiting:
            self._host.ask = lambda *shards: None  # type: ignore[method-assign]
        relay = super().start(run, after)
        self._host.ask = asked  # type: ignore[method-assign]
        return relay


class HostFreeAtOnce(StagedLane):
    """the host's slot is given back without waiting for the copy out of it"""

    def _pass_on(self) -> None:
        done = self._host.done
        self._host.done = lambda *arrivals, used: done(*arrivals, used=None)  # type: ignore[method-assign]
        super()._pass_on()
        self._host.done = done  # type: ignore[method-assign]


class HostFreeAtCompute(StagedLane):
    """the host's slot is given back after compute's mark in place of the copy's"""

    def _pass_on(self) -> None:
        done = self._host.done
        self._host.done = lambda *arrivals, used: done(*arrivals, used=self._direct.mark_used())  # type: ignore[method-assign]
        super()._pass_on()
        self._host.done = done  # type: ignore[method-assign]


class NoAfterOnDevice(StagedLane):
    """a staged copy does not wait for the compute that reads its slot on the device"""

    def start(self, run: Run, after: SyncPoint | None) -> Relay:
        return super().start(run, after if self._is_direct(run[0][0]) else None)


class WaitsForNothing(StagedLane):
    """compute waits for a copy's event that is not yet recorded"""

    def wait(self, ready: Relay) -> None:
        if ready.copied is not None:
            super().wait(ready)


class Stack(StagedLane):
    """shards are passed on youngest first"""

    def _pass_on(self) -> None:
        self._waiting.rotate(1)
        super()._pass_on()


class CloseWithoutHost(StagedLane):
    """close leaves the readers reading"""

    def close(self) -> None:
        self._staging.close()
        self._direct.close()


class CloseWithoutStaging(StagedLane):
    """close does not wait for staged copies"""

    def close(self) -> None:
        self._host.close()
        self._direct.close()


@dataclass(frozen=True)
class Bug:
    tiers: str
    parts: Parts
    kind: type[Any]

    @property
    def name(self) -> str:
        return f"{self.kind.__name__} ({self.tiers})"

    def schedules_until_found(self, limit: int) -> int | None:
        """How many schedules it takes, None where `limit` do not show it."""
        return next((seed + 1 for seed in range(limit) if self.shows(seed)), None)

    def shows(self, seed: int) -> bool:
        try:
            run(seed, self.tiers, self.parts)
        except (Race, Deadlock, ValueError):
            return True
        return False


def _bugs(tiers: str, part: Callable[[type[Any]], Parts], *kinds: type[Any]) -> list[Bug]:
    return [Bug(tiers, part(kind), kind) for kind in kinds]


BUGS = [
    *_bugs(
        "device", lambda kind: Parts(copies=kind),
        NoReadyWait, NoUsedWait, EarlyReady, ReadyBetween, ReadyOnCompute, UsedOnSide, UsedNotRecorded, SideWaits,
        ComputeWaits, WaitsTooLate, PreviousReady, SharedUsed, NewSideEachTime, CloseWithoutSide, CloseWithoutCompute,
        WrongBytes, FirstOfARun, AnyRun,
    ),
    *_bugs(
        "device", lambda kind: Parts(stream=kind),
        NoMark, MarkOnArrival, StaleMark, FirstMark, ReleaseBeforeMark, ReleaseOnArrival, ReleaseAll, NoWait,
        PreviousCopy, CloseKeepsMoving, RecallBegun, RecallForgets, RecallOne, AskFirst, SkipTheLarge, UsedOnlyAtOnce,
        WaitOnce,
    ),
    *_bugs(
        "host", lambda kind: Parts(stream=kind), ReleaseOnArrival, ReleaseAll, NoWait, PreviousCopy, CloseKeepsMoving
    ),
    *_bugs("host", lambda kind: Parts(ring=kind), NoSkip, OneTooMany, ReleaseYoungest, Unpadded, NoWrap),
    *_bugs("host", lambda kind: Parts(readers=kind), DoneAtFirstChunk, DoneBeforeRead, LostChunk, LateChunk, NotJoined),
    *_bugs("staged", lambda kind: Parts(readers=kind), ReadWithoutAfter, ReadBeforeAfter, FirstChunkOnly),
    *_bugs(
        "staged", lambda kind: Parts(staged=kind),
        NoHostWait, PassOnEverything, HostAskedTwice, HostNotAsked,
        HostFreeAtOnce, HostFreeAtCompute, NoAfterOnDevice, WaitsForNothing, Stack,
        CloseWithoutHost, CloseWithoutStaging,
    ),
]  # fmt: skip
