"""Three tiers at once (`offload/stream/cuda_lane.py`): pinned shards do not wait for the disk, the others are passed on
as they come, errors too.

That no order of the machine's own breaks it is test_stream.py's business, with the same simulator.
"""

from types import ModuleType
from typing import Any

import pytest

from moedge.offload.device import Pinned
from moedge.offload.stream.cuda_lane import CudaLane, StagedLane
from moedge.offload.stream.stream import ALIGNMENT, Ring, Shard, ShardStream, StreamBroken


class Tiers:
    """Two shards on disk (0 and 2), two in the slab, a host ring of four pages, a device ring of `pages`."""

    def __init__(self, simulator: ModuleType, pages: int = 12) -> None:
        self.machine = simulator.Machine(0)
        self.machine.haste = 0.0  # nothing happens until it is waited for
        cuda = simulator.Cuda(self.machine)
        self.shards = [
            Shard(f"s{index}", 2 * ALIGNMENT, 2 * index * ALIGNMENT, simulator.FILE if index in {0, 2} else None)
            for index in range(4)
        ]
        host, self.device = simulator.Memory(cuda, 4 * ALIGNMENT), simulator.Memory(cuda, pages * ALIGNMENT)
        slab = simulator.Memory(cuda, 8 * ALIGNMENT, None)
        ring, whole = (
            Pinned(cuda, address, len(memory), cuda.clear_error)
            for address, memory in ((1 << 40, host), (1 << 41, slab))
        )
        self.readers = simulator.Readers(self.machine, host)
        staging, direct = CudaLane(cuda, host, ring, self.device), CudaLane(cuda, slab, whole, self.device)
        self.host = ShardStream(self.readers, Ring(len(host)), host)
        self.lane = StagedLane(self.host, staging, direct, lambda shard: shard.file is None)
        self.stream: ShardStream[Any] = ShardStream(self.lane, Ring(len(self.device)), self.device)

    def ask(self) -> None:
        self.stream.ask(*self.shards)

    def close(self) -> None:
        self.stream.close()
        for reader in self.readers.readers:
            reader.stop()


def test_pinned_shards_are_copied_while_the_disk_is_still_read(simulator: ModuleType) -> None:
    tiers = Tiers(simulator)
    tiers.ask()
    assert not tiers.stream.is_ready()
    movers = [actor for actor in tiers.machine.actors if isinstance(actor, simulator.Stream)]
    while any(actor.able() and (actor.advance() or True) for actor in movers):
        pass
    assert tiers.device.cells[2:4] == [(None, 2), (None, 3)]
    assert tiers.device.cells[6:8] == [(None, 6), (None, 7)]
    assert not tiers.stream.is_ready(), "the first one is on disk"
    tiers.close()


def test_what_has_come_from_disk_is_passed_on_by_any_call(simulator: ModuleType) -> None:
    tiers = Tiers(simulator)
    tiers.ask()
    assert not tiers.stream.is_ready()
    tiers.machine.run_until(lambda: tiers.readers.nbytes_moved == 4 * ALIGNMENT)
    tiers.lane.mark_used()
    tiers.machine.run_until(tiers.stream.is_ready)
    assert tiers.device.cells[:2] == [(simulator.FILE, 0), (simulator.FILE, 1)]
    assert tiers.lane.nbytes_moved > tiers.readers.nbytes_moved
    assert tiers.lane.seconds_waited == 0
    tiers.close()


def test_the_host_s_place_is_read_into_again_as_soon_as_its_copy_is_over(simulator: ModuleType) -> None:
    tiers = Tiers(simulator)
    tiers.ask()
    for arrival in tiers.stream.cycle(8):
        tiers.machine.compute.synchronize()
        assert arrival.view.read() == [
            (arrival.shard.file, arrival.shard.offset // ALIGNMENT + index) for index in (0, 1)
        ]
    assert tiers.readers.nbytes_moved >= 8 * ALIGNMENT
    tiers.close()


def test_a_reader_s_failure_reaches_the_consumer(simulator: ModuleType) -> None:
    tiers = Tiers(simulator)
    tiers.ask()
    assert not tiers.stream.is_ready()
    tiers.readers.fail(OSError("bad sector"))
    with pytest.raises(StreamBroken, match="bad sector"):
        tiers.stream.next()
    tiers.close()


def test_a_second_asker_of_the_host_s_stream_is_noticed(simulator: ModuleType) -> None:
    tiers = Tiers(simulator)
    tiers.host.ask(tiers.shards[2])
    tiers.ask()
    with pytest.raises(ValueError, match="another consumer"):
        tiers.stream.next()
    tiers.close()
