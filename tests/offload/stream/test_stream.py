"""Shards arrive in the order of requests, the stream runs ahead as far as the ring allows, whatever the timing."""

from types import ModuleType

import pytest

from moedge.offload.stream.stream import ALIGNMENT, Ring, Run, Shard, ShardStream, StreamBroken, SyncPoint

SOURCE = bytes(range(256)) * 4096


class Copied:
    """A copy that was over before anyone asked."""

    def query(self) -> bool:
        return True


class MemoryLane:
    """Copies at once and writes down what it was asked for."""

    most_together = 1

    def __init__(self, memory: bytearray) -> None:
        self.memory = memory
        self.started: list[str] = []
        self.after: list[SyncPoint | None] = []
        self.closed = False
        self.nbytes_moved = 0
        self.seconds_waited = 0.0
        self.seconds_busy = 0.0

    def start(self, run: Run, after: SyncPoint | None) -> Copied:
        ((shard, slot),) = run
        self.memory[slot.offset : slot.end] = SOURCE[shard.offset : shard.offset + shard.nbytes]
        self.started.append(shard.name)
        self.after.append(after)
        self.nbytes_moved += shard.nbytes
        return Copied()

    def wait(self, ready: Copied) -> None:
        pass

    def mark_used(self) -> None:
        return None

    def close(self) -> None:
        self.closed = True


def shards(*pages: int) -> list[Shard]:
    begins = [sum(pages[:index]) * ALIGNMENT for index in range(len(pages))]
    return [Shard(f"s{i}", size * ALIGNMENT - i, begins[i]) for i, size in enumerate(pages)]


def stream_of(capacity_pages: int) -> tuple[ShardStream[memoryview], MemoryLane]:
    memory = bytearray(capacity_pages * ALIGNMENT)
    lane = MemoryLane(memory)
    return ShardStream(lane, Ring(len(memory)), memoryview(memory)), lane


def test_shards_come_in_turn_pass_after_pass_with_their_bytes() -> None:
    stream, _ = stream_of(9)
    stream.ask(*shards(2, 3, 1, 4))
    for index, arrival in enumerate(stream.cycle(40)):
        assert arrival.shard.name == f"s{index % 4}"
        assert bytes(arrival.view) == SOURCE[arrival.shard.offset : arrival.shard.offset + arrival.shard.nbytes]
    assert stream.num_arrived == 40
    assert stream.nbytes_arrived == 10 * sum(shard.nbytes for shard in shards(2, 3, 1, 4))
    assert stream.lane.nbytes_moved >= stream.nbytes_arrived


def test_it_runs_ahead_by_bytes_and_into_the_next_pass() -> None:
    stream, lane = stream_of(11)
    stream.ask(*shards(2, 3, 1), *shards(2, 3, 1))
    assert lane.started == ["s0", "s1", "s2", "s0", "s1"], "11 pages"
    assert [shard.name for shard in stream.recall()] == ["s2"]


def test_a_place_given_back_is_filled_again_at_once_after_its_mark() -> None:
    class Point:
        def synchronize(self) -> None:
            pass

    stream, lane = stream_of(4)
    stream.ask(*shards(2, 2), *shards(2, 2))
    first = stream.next()
    point = Point()
    stream.done(first, used=point)
    assert lane.started == ["s0", "s1", "s0"]
    assert lane.after == [None, None, point]


def test_no_copy_goes_on_at_the_beginning_of_the_ring() -> None:
    """The shard two before, in the slot two before: as far apart as neighbours are, the other way round."""
    stream, lane = stream_of(3)
    lane.most_together = 8
    first, second, third = shards(1, 1, 1)
    stream.ask(first, second)
    stream.done(stream.next())
    stream.ask(third, first)
    assert lane.started == ["s0", "s1", "s2", "s0"]


def test_several_arrivals_are_held_and_go_back_in_order() -> None:
    stream, _ = stream_of(6)
    stream.ask(*shards(2, 2, 2))
    first, second = stream.next(), stream.next()
    with pytest.raises(ValueError, match="not the oldest"):
        stream.done(second)
    kept = bytes(second.view)
    stream.done(first)
    assert bytes(second.view) == kept
    stream.done(second)
    with pytest.raises(ValueError, match="not the oldest"):
        stream.done(second)


def test_asking_for_more_than_fits_beside_what_is_held_is_an_error_not_a_hang() -> None:
    stream, _ = stream_of(4)
    stream.ask(*shards(2, 3))
    stream.next()
    with pytest.raises(ValueError, match="does not fit"):
        stream.next()


def test_a_shard_larger_than_the_ring_is_refused() -> None:
    stream, _ = stream_of(4)
    with pytest.raises(ValueError, match="capacity"):
        stream.ask(*shards(2, 5))


def test_what_was_not_asked_for_does_not_come() -> None:
    stream, _ = stream_of(4)
    with pytest.raises(ValueError, match="no shard was requested"):
        stream.next()


def test_what_has_not_begun_can_be_taken_back_and_what_has_comes() -> None:
    stream, lane = stream_of(4)
    asked = shards(2, 2, 1, 1)
    stream.ask(*asked)
    assert stream.recall() == asked[2:]
    assert stream.recall() == []
    stream.ask(asked[3])
    found = []
    for _ in range(3):
        arrival = stream.next()
        found.append(arrival.shard)
        stream.done(arrival)
    assert found == [asked[0], asked[1], asked[3]]
    assert lane.started == ["s0", "s1", "s3"]


def test_nothing_is_started_after_close() -> None:
    stream, lane = stream_of(4)
    stream.ask(*shards(2, 2))
    arrival = stream.next()
    stream.close()
    assert lane.closed
    for ask in (stream.next, stream.is_ready, lambda: stream.done(arrival)):
        with pytest.raises(StreamBroken, match="closed"):
            ask()


@pytest.mark.sample("host-100", "device-100", "staged-100")
@pytest.mark.parametrize("schedules", [100, 300])
@pytest.mark.parametrize("tiers", ["host", "device", "staged"])
def test_no_schedule_of_the_machine_breaks_the_stream(simulator: ModuleType, tiers: str, schedules: int) -> None:
    outcomes = [simulator.run(seed, tiers) for seed in range(schedules)]
    assert sum(outcome.num_arrived for outcome in outcomes) > 5 * schedules
    assert sum(outcome.nbytes_moved for outcome in outcomes) > 5 * schedules * ALIGNMENT


def test_every_seeded_bug_is_found(seeded_bugs: ModuleType) -> None:
    found = {bug.name: bug.schedules_until_found(1000) for bug in seeded_bugs.BUGS}
    assert len(found) >= 30
    assert {name for name, schedules in found.items() if schedules is None} == set()


def test_the_machine_sees_a_deadlock(simulator: ModuleType) -> None:
    machine = simulator.Machine(0)
    event = simulator.Event(machine)
    waits, records = simulator.Stream(machine), simulator.Stream(machine)
    records.steps.append(simulator.Completion())
    event.record(records)
    waits.wait_event(event)
    with pytest.raises(simulator.Deadlock):
        waits.synchronize()


def test_the_machine_keeps_cuda_s_rules_for_events(simulator: ModuleType) -> None:
    machine = simulator.Machine(0)
    stream, other, event = simulator.Stream(machine), simulator.Stream(machine), simulator.Event(machine)
    other.wait_event(event)
    assert not other.steps, "a wait on an event that was never recorded is no wait"
    machine.haste = 0.0
    event.record(stream)
    other.wait_event(event)
    stream.steps.append(simulator.Completion())
    event.record(stream)
    other.synchronize()
    assert not event.query(), "recorded anew, while the wait was for the record before"
