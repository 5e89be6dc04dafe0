"""Which way streamed shards take: from disk into host memory, or through pinned host memory to the device.

The one place that chooses between lanes; streams, events and threads are theirs.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ...offload.device import Device
from ...offload.host_memory import HostMemory
from ...offload.page_locked import Pinned
from ...offload.store.shard_file import ShardExtent
from ...offload.store.store import Store
from ...offload.stream.cuda_lane import CudaLane
from ...offload.stream.lane import Lane, Ring, Shard
from ...offload.stream.reader_lane import DirectFile, HostBytes, ReaderLane, Source
from ...offload.stream.staged_lane import StagedLane
from ...offload.stream.stream import ShardStream
from ..plan.placement import Placement, Plan
from .memory import DENSE, ShardKey, WeightMemory


class Lanes:
    """A stream of dense shards and one of experts, None where nothing of the kind streams. Close it when done."""

    def __init__(self, memory: WeightMemory, plan: Plan, store: Store | None) -> None:
        self._memory = memory
        self._store = store
        self.readers: list[ReaderLane] = []
        self._copiers: list[CudaLane] = []
        self.ring_nbytes: list[int] = []
        dense = [key for key in memory.streamed if key.expert == DENSE]
        experts = [key for key in memory.streamed if key.expert != DENSE]
        self._pins: _Pins | None = None
        self.dense: ShardStream[Any] | None = None
        self.experts: ShardStream[Any] | None = None
        # Any expert may come from the disk when some do: which ones are held changes from pass to pass.
        may_come = memory.experts if any(key.expert != DENSE for key in memory.on_disk) else experts
        with ExitStack() as opened:
            opened.callback(self.close)
            if memory.device and plan.staging:
                self._pins = _Pins(memory, plan.staging.placement, dense, experts)
            self.dense = self._open(dense, plan.placement.dense_ring, 0)
            self.experts = self._open(may_come, plan.placement.expert_ring, 1)
            opened.pop_all()
        if self.dense is not None:
            self.dense.ask(*map(self.shard, dense))

    @property
    def streams(self) -> list[ShardStream[Any]]:
        return [stream for stream in (self.dense, self.experts) if stream is not None]

    @property
    def seconds_waited(self) -> tuple[float, float]:
        """How long compute stood still for want of bytes: from readers, from copies to the device."""
        disk = sum(reader.seconds_waited for reader in self.readers)
        return disk, sum(copier.seconds_waited for copier in self._copiers)

    def shard(self, key: ShardKey) -> Shard:
        """Where the bytes of a shard come from that is not held."""
        if run := self._memory.staged.get(key):
            return Shard(f"layer {key.layer} shard {key.expert}", self._memory.nbytes(key), run.start)
        assert self._store is not None
        place = place_of(self._store, key)
        name = f"{place.path.name} {place.tensor} {place.index}"
        return Shard(name, place.nbytes, place.offset, place.path, place.crc32)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        if self._pins is not None:
            self._pins.close()

    def _open(self, keys: list[ShardKey], ring: int, kind: int) -> ShardStream[Any] | None:
        if not keys:
            return None
        shards = [self.shard(key) for key in keys]
        if self._pins is None:
            memory = HostMemory(ring)
            self.ring_nbytes.append(memory.nbytes)
            return ShardStream(self._readers(shards, memory), Ring(ring), memory.bytes)
        device = self._pins.device
        room = device.allocate(ring)
        self.ring_nbytes.append(room.numel())
        return ShardStream(self._copies(shards, room, self._pins, kind), Ring(ring), room)

    def _copies(self, shards: list[Shard], room: Any, pins: _Pins, kind: int) -> Lane[Any]:
        direct = CudaLane(pins.device.cuda, self._memory.slab.bytes, pins.slab, room)
        self._copiers.append(direct)
        rest = [shard for shard in shards if not pins.is_direct(shard)]
        if not rest:
            return direct
        ring, pinned = pins.rings[kind]
        host = ShardStream(self._readers(rest, ring), Ring(ring.nbytes), ring.bytes)
        staging = CudaLane(pins.device.cuda, ring.bytes, pinned, room)
        return StagedLane(host, staging, direct, pins.is_direct)

    def _readers(self, shards: list[Shard], memory: HostMemory) -> ReaderLane:
        sources = {file: self._source(file) for file in {shard.file for shard in shards}}
        lane = ReaderLane(sources, memory.view)
        self.readers.append(lane)
        return lane

    def _source(self, file: Path | None) -> Source:
        """A file, or the slab as far as it could not be pinned."""
        return HostBytes(self._memory.slab.view) if file is None else DirectFile(file)


class _Pins:
    """What of the host is page-locked: the slab alone where that suffices, else the rings first, then the slab.

    With pinned rings everything can be streamed to the device, at the price of a copy in the host.
    """

    def __init__(
        self, memory: WeightMemory, staging: Placement, dense: list[ShardKey], experts: list[ShardKey]
    ) -> None:
        assert memory.device is not None
        self.device: Device = memory.device
        self.rings: list[tuple[HostMemory, Pinned]] = []
        self.slab = memory.pin_slab()
        with ExitStack() as opened:
            # Memory that is freed while it is registered could never be pinned again at its addresses.
            opened.callback(self.close)
            if memory.on_disk or self.slab.nbytes < memory.slab.nbytes:
                self.slab.close()
                for keys, nbytes in ((dense, staging.dense_ring), (experts, staging.expert_ring)):
                    ring = HostMemory(nbytes if keys else 0)
                    self.rings.append((ring, ring.pin(self.device)))
                self.slab = memory.pin_slab()
            opened.pop_all()

    def is_direct(self, shard: Shard) -> bool:
        """Whether the device copies the shard by itself from where it lies."""
        return shard.file is None and shard.offset + shard.nbytes <= self.slab.nbytes

    def close(self) -> None:
        self.slab.close()
        for _, pinned in self.rings:
            pinned.close()


def place_of(store: Store, key: ShardKey) -> ShardExtent:
    """Where a layer's shard lies in a store."""
    layer = store.layers[key.layer]
    place = layer.dense if key.expert == DENSE else layer.experts[key.expert]
    assert place is not None
    return place
